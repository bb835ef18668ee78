from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.cluster.long_lines import in_pieces, joined_pieces

TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=5000)


@given(st.dictionaries(st.from_regex(r"n[0-9]{1,3}", fullmatch=True), TEXT, max_size=5), st.randoms())
def test_pieces_of_many_tasks_are_joined_however_they_come(texts: dict[str, str], random) -> None:
    lines = [line for host, text in texts.items() for line in in_pieces("x", host, text).splitlines()]
    random.shuffle(lines)
    assert sorted(joined_pieces("x", "\n".join([*lines, "srun: a word of its own"]))) == sorted(texts.values())


def test_no_line_is_longer_than_srun_takes_and_half_a_text_is_left_out() -> None:
    lines = in_pieces("x", "n1:77", "a" * 5000).splitlines()
    assert max(len(line) for line in lines) < 1024
    assert joined_pieces("x", "\n".join(lines[1:])) == []
    assert joined_pieces("y", "\n".join(lines)) == []
    assert joined_pieces("x", in_pieces("x", "n1", "")) == [""]
