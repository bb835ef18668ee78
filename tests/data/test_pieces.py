"""Whole documents of which ranks share long ones: tokens, labels and masks of each piece, read once for a node."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hpc_train.config import DataConfig, TrainConfig
from hpc_train.data.agent_batches import AgentAddress, AgentBatches, ReadingPlace
from hpc_train.data.batch_source import OwnBatches
from hpc_train.data.feed import Feed, open_feed
from hpc_train.data.index import TokenFile, loss_mask_prefix
from hpc_train.data.index_writer import TokenFileWriter
from hpc_train.data.loader import Loader
from hpc_train.data.node_steps import NodeSteps, spec_of
from hpc_train.errors import ConfigError
from hpc_train.plan.batch_cost import BatchCosts, OffloadCosts
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.batch_problem import HdpRanks
from hpc_train.plan.batch_setup import BatchSetup
from tests.agents import NODE, ServedAgent
from tests.data.corpora import VOCAB, configs, numbered, write

LONGEST, NUM_RANKS, CAPACITY = 600, 4, 160
LENGTHS = [3, 590, 0, 17, 1, 250, 600, 15, 161, 50, 130, 900]


def setup_of(planner: str = "balanced", num_ranks: int = NUM_RANKS) -> BatchSetup:
    costs = BatchCosts(1, 300, 10, 3, 7)
    return BatchSetup(planner, LONGEST, HdpRanks.alike(num_ranks, CAPACITY), costs, num_layers=2)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Two datasets of one vocabulary, the second with a loss mask."""
    documents = [[(start + i) % VOCAB for i in range(length)] for start, length in enumerate(LENGTHS)]
    first = write(tmp_path / "first", documents)
    second = write(tmp_path / "second", documents[:8], np.int32)
    with TokenFileWriter(loss_mask_prefix(second), np.uint8) as writer:
        for document in documents[:8]:
            writer.add_document([int(token % 3 > 0) for token in document])
        writer.finish()
    return [first, second]


def sections(prefixes: list[str], steps: int = 4) -> tuple[DataConfig, TrainConfig]:
    data, train = configs(prefixes, steps=steps, size=2, seq_len=LONGEST)
    masked = data.train[1].model_copy(update={"loss_mask": True})
    return data.model_copy(update={"train": (data.train[0], masked)}), train


def place(rank: int, num_ranks: int = NUM_RANKS, wants_tokens: bool = True) -> ReadingPlace:
    return ReadingPlace(num_ranks, rank, wants_tokens, local_rank=rank, local_world_size=num_ranks)


def values(batch: PieceBatch) -> tuple[object, ...]:
    return batch.rank, batch.micro_batch, batch.lengths, batch.tokens.tolist(), batch.labels.tolist()


@pytest.mark.parametrize("planner", ["balanced", "naive", "static"])
def test_ranks_have_every_token_once_with_the_next_one_of_its_document_as_label(two: list[str], planner: str) -> None:
    """FC-82, FC-81: labels are those of the document before it is shared out, at borders of parts as inside."""
    data, train = sections(two)
    loader = Loader(data, train, vocab_size=VOCAB, dp=NUM_RANKS, batches=setup_of(planner))
    files = [TokenFile.open(prefix) for prefix in two]
    mask = TokenFile.open(loss_mask_prefix(two[1]))
    shared = 0
    for number in range(1, 5):
        step = loader.next_step(number)
        found: dict[int, dict[int, tuple[int, int]]] = {}
        for rank in range(NUM_RANKS):
            for batch in loader.piece_batches(step, rank):
                assert batch.num_tokens <= CAPACITY
                shared += batch.micro_batch.ring is not None
                keys = zip(batch.sequences().tolist(), batch.positions().tolist(), strict=True)
                for (sequence, position), token, label in zip(keys, batch.tokens, batch.labels, strict=True):
                    assert position not in found.setdefault(sequence, {})
                    found[sequence][position] = (int(token), int(label))
        assert sorted(found) == list(range(len(step.rows)))
        for sequence, ref in enumerate(step.rows):
            (piece,) = loader.blend.packings[ref.source].row(ref.epoch, ref.row)
            document = files[ref.source].read_document(piece.document).tolist()
            following = [*document[1:], -100]
            if ref.source == 1:
                marks = [*mask.read_document(piece.document).tolist()[1:], 0]
                following = [label if mark else -100 for label, mark in zip(following, marks, strict=True)]
            whole = range(piece.start, piece.start + piece.length)
            expected = {place: (document[at], following[at]) for place, at in enumerate(whole)}
            assert found[sequence] == expected
    assert shared


def test_the_agent_gives_what_ranks_would_read_by_themselves(agent: ServedAgent, two: list[str]) -> None:
    data, train = sections(two)
    setup = setup_of()
    spec = spec_of(data, train, vocab_size=VOCAB, dp=NUM_RANKS, batches=setup)
    with ThreadPoolExecutor(NUM_RANKS) as pool:

        def steps_of(rank: int) -> list[object]:
            source = AgentBatches(AgentAddress(agent.key, NODE, "s"), place(rank), spec, patience_s=1.0)
            taken = [source.step(number) for number in range(1, 5)]
            source.close()
            return [([values(batch) for batch in one.batches], one.state, one.digest) for one in taken]

        found = list(pool.map(steps_of, range(NUM_RANKS)))
    for rank, steps in enumerate(found):
        own = OwnBatches(Loader(data, train, vocab_size=VOCAB, dp=NUM_RANKS, batches=setup), rank)
        expected = [own.step(number) for number in range(1, 5)]
        assert steps == [([values(batch) for batch in one.batches], one.state, one.digest) for one in expected]
    digests = [[step[2] for step in steps] for steps in found]
    assert all(of_rank == digests[0] for of_rank in digests)
    assert len(set(digests[0])) == 4 and all(len(digest) == 8 for digest in digests[0])


def test_a_node_s_part_is_read_once_and_no_more_than_it(two: list[str]) -> None:
    """Two tp ranks of each place, and neighbours of a ring, of which each needs one token more for its last label."""
    data, train = sections(two, steps=1)
    setup = setup_of()
    reader = NodeSteps(spec_of(data, train, vocab_size=VOCAB, dp=NUM_RANKS, batches=setup), num_at_once=4)
    ranks = [SimpleNamespace(place=rank, wants_tokens=True) for rank in (0, 0, 1, 1)]
    prepared = reader.prepare(1, ranks)
    loader = Loader(data, train, vocab_size=VOCAB, dp=NUM_RANKS, batches=setup)
    step = loader.next_step(1)
    batches = [batch for rank in (0, 1) for batch in loader.piece_batches(step, rank)]
    widths = {0: 2, 1: 4 + 1}  # bytes of a token and of its mask, by source
    tokens = {source: sum(
        piece.length for batch in batches for piece in batch.micro_batch.sequences
        if step.rows[piece.sequence].source == source
    ) for source in (0, 1)}  # fmt: skip
    pieces = sum(len(batch.micro_batch.sequences) for batch in batches)
    least = sum(tokens[source] * width for source, width in widths.items())
    used = int(reader.summary().split("from ")[1].split()[0])
    assert least <= used <= least + pieces * max(widths.values())
    assert prepared.segment is not None
    assert set(prepared.parts) == {0, 1} and len(prepared.digest) == 16
    prepared.close()
    reader.close()


def test_stages_in_the_middle_know_their_pieces_and_get_no_tokens(agent: ServedAgent, two: list[str]) -> None:
    data, train = sections(two)
    spec = spec_of(data, train, vocab_size=VOCAB, dp=1, batches=setup_of(num_ranks=NUM_RANKS))
    ends = ReadingPlace(NUM_RANKS, 1, True, local_rank=0, local_world_size=2)
    middle = ReadingPlace(NUM_RANKS, 1, False, local_rank=1, local_world_size=2)
    with ThreadPoolExecutor(2) as pool:
        sources = list(pool.map(
            lambda one: AgentBatches(AgentAddress(agent.key, NODE, "s"), one, spec, patience_s=1.0), (ends, middle)
        ))  # fmt: skip
        with_tokens, without = pool.map(lambda source: source.step(1), sources)
    assert [one.micro_batch for one in with_tokens.batches] == [one.micro_batch for one in without.batches]
    assert any(one.tokens.any() for one in with_tokens.batches) and not any(one.tokens.any() for one in without.batches)
    for source in sources:
        source.close()


def test_a_rank_without_work_has_one_empty_micro_batch(tmp_path: Path) -> None:
    """More ranks than sequences: some take part with no tokens."""
    prefix = write(tmp_path / "set", numbered([5, 7]))
    data, train = configs([prefix], steps=1, size=1, seq_len=12)
    batches = BatchSetup("balanced", 12, HdpRanks.alike(8, CAPACITY), BatchCosts(1, 300), 1)
    loader = Loader(data, train, vocab_size=VOCAB, dp=8, batches=batches)
    step = loader.next_step(1)
    tokens = [sum(batch.num_tokens for batch in loader.piece_batches(step, rank)) for rank in range(8)]
    assert sorted(tokens)[:6] == [0] * 6 and sum(tokens) == 12
    empty = loader.piece_batches(step, tokens.index(0))
    assert [(batch.num_tokens, batch.num_supervised, len(batch.labels)) for batch in empty] == [(0, 0, 0)]


def test_a_run_goes_on_from_a_saved_position_with_the_same_pieces(two: list[str]) -> None:
    """FC-84, over the border of an epoch."""
    data, train = sections(two, steps=12)

    def feed() -> Feed:
        return open_feed(data, train, vocab_size=VOCAB, place=place(2), agent=None, batches=setup_of())

    whole = feed()
    expected, states, digests = [], [whole.state()], []
    for number in range(1, 13):
        expected.append([values(batch) for batch in whole.micro_batches(number)])
        states.append(whole.state())
        digests.append(whole.plan_ahead(number + 1))
    assert digests[-1] == b"" and len(set(digests)) == 12
    for at in (1, 5, 11):
        later = feed()
        later.restore(states[at])
        assert [[values(batch) for batch in later.micro_batches(n)] for n in range(at + 1, 13)] == expected[at:]
        later.close()
    whole.close()


def test_held_out_documents_are_the_same_at_each_evaluation(two: list[str]) -> None:
    data, train = sections(two)
    data = data.model_copy(update={"heldout": data.train[:1]})
    feed = open_feed(data, train, vocab_size=VOCAB, place=place(0), agent=None, batches=setup_of())
    rounds = [[(part.digest, [values(batch) for batch in part.batches]) for part in feed.heldout()] for _ in range(2)]
    assert rounds[0] == rounds[1] and 1 <= len(rounds[0]) <= train.eval_batches
    assert all(digest for digest, _ in rounds[0])
    feed.close()


def test_a_sequence_that_the_ranks_cannot_hold_is_refused_with_what_would_fit(two: list[str]) -> None:
    data, train = sections(two)
    costs = BatchCosts(1, 300, offload=OffloadCosts(2, 10))
    small = BatchSetup("balanced", LONGEST, HdpRanks.alike(2, CAPACITY), costs, 2)
    loader = Loader(data, train, vocab_size=VOCAB, dp=2, batches=small)
    with pytest.raises(ConfigError, match=r"has \d+ tokens, and 2 hdp ranks of 160 tokens .* hold 320 at most"):
        for number in range(1, 5):
            loader.next_step(number)
