"""From a configuration to the parts of a run, after every check that can be made before training."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hpc_train.cluster.agent_address import read_job_key, this_node
from hpc_train.cluster.agent_wait import AgentLimits
from hpc_train.cluster.environment import process_env
from hpc_train.comm.groups import Groups, build_groups
from hpc_train.comm.world import World
from hpc_train.config import Config
from hpc_train.data.agent_batches import AgentAddress, ReadingPlace
from hpc_train.data.feed import Feed, open_feed
from hpc_train.errors import HpcTrainError
from hpc_train.log import say
from hpc_train.models.transformer import Transformer
from hpc_train.parallel.apply import build_part, set_initial_weights, set_recomputation
from hpc_train.parallel.data import ShardedParameters
from hpc_train.parallel.exchange import Exchange
from hpc_train.parallel.pipeline import Pipeline
from hpc_train.parallel.split_backward import WeightQueue, queue_weights
from hpc_train.plan.batch_of_run import batches_of_plan
from hpc_train.plan.groups import BACKWARD, training_plan
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import UNSPLIT, ModelPart, TensorSplit, num_parameters, plan_parameters, row_unit
from hpc_train.plan.run import Plan
from hpc_train.plan.schedule_collectives import updates_early
from hpc_train.plan.stages import stage_parts
from hpc_train.record import NOT_RECORDED, Recorder
from hpc_train.train.lamb import ShardedLamb
from hpc_train.train.loop import Run
from hpc_train.train.metrics import Metrics
from hpc_train.train.optimizer import ShardedAdamW, ShardedOptimizer
from hpc_train.train.peak import world_peak_flops
from hpc_train.train.step import Trainer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WIRES = {"fp32": None, "bf16": torch.bfloat16}


def build_run(run_dir: Path, config: Config, mesh: Mesh, world: World, recorder: Recorder = NOT_RECORDED) -> Run:
    """Everything that the loop needs. Collective over all ranks.

    Raises:
        ConfigError, DataError: on every rank, before any collective of the training.
    """
    feed = _open_data(config, mesh, world)
    trainer = build_trainer(config, mesh, world, recorder=recorder)
    peak, origin = world_peak_flops(world, _DTYPES[config.train.precision], config.train.peak_flops_per_rank)
    if world.rank == 0:
        count = num_parameters(config.model, config.data.seq_len)
        say(f"model: {count / 1e6:.2f} M parameters, {config.train.precision}")
        say(f"peak of all ranks for MFU: {'not known' if peak is None else f'{peak / 1e9:.1f} GFLOP/s'} ({origin})")
    return Run(config, world, run_dir, trainer, feed, _open_metrics(run_dir, config, world), peak, recorder)


def build_trainer(
    config: Config, mesh: Mesh, world: World, dtype: torch.dtype | None = None, recorder: Recorder = NOT_RECORDED
) -> Trainer:
    """This rank's model_chunks, their sharded parameters and optimizer, and its place in the pipeline.

    dtype: of the parameters; None for what train.precision says.
    """
    dtype = dtype or _DTYPES[config.train.precision]
    parts = stage_parts(config, mesh)
    groups = build_groups(world, training_plan(mesh, with_tied=config.model.tied_embeddings), recorder)
    own = parts[groups.coords["pp"] :: mesh.pp]
    say(f"this rank: {_place(groups.coords, own, mesh)}")
    chunks = [_build_chunk(config, part, groups, world, dtype) for part in own]
    models, parameters = [model for model, _ in chunks], tuple(sharded for _, sharded in chunks)
    queues = None
    if config.parallel.schedule == "zero_bubble":
        queues = [WeightQueue(sharded.gradient_of) for sharded in parameters]
        for model, queue in zip(models, queues, strict=True):
            queue_weights(model, queue)
    return Trainer(
        Pipeline(models, groups.along("pp"), groups.along(BACKWARD), dtype, queues),
        parameters,
        _optimizer(parameters, config, groups),
        groups,
        config.optimizer.clip_grad_norm,
        world.device,
        schedule=config.parallel.schedule,
        overlap=config.parallel.overlap,
        early_updates=updates_early(config, mesh),
        has_tied=config.model.tied_embeddings,
        seed=config.train.seed,
        dropout=config.model.dropout,
        token_unit=row_unit(config, mesh.tp),
    )


def _build_chunk(
    config: Config, part: ModelPart, groups: Groups, world: World, dtype: torch.dtype
) -> tuple[Transformer, ShardedParameters]:
    """One model_chunk with its first weights, and its parameters in flat buffers."""
    split = TensorSplit(groups.mesh.tp, groups.coords["tp"], config.parallel.sequence_parallel)
    exchange = Exchange(groups.along("tp"), split.sequence_parallel, config.parallel.tp_tiles)
    model, plans = build_part(config.model, config.data.seq_len, part, split, exchange, world.device)
    set_recomputation(model, config.train.recompute)
    set_initial_weights(model, plans, config.train.seed)
    sharded = ShardedParameters(model, groups.along("dp"), dtype, plans, _WIRES[config.parallel.gradient_wire])
    gc.collect()  # the tensors that the flat buffer replaced
    return model, sharded


def _optimizer(chunks: Sequence[ShardedParameters], config: Config, groups: Groups) -> ShardedOptimizer:
    if config.optimizer.name == "adamw":
        return ShardedAdamW(chunks, config.optimizer)
    whole = plan_parameters(config.model, config.data.seq_len, ModelPart.whole(config.model), UNSPLIT)
    matrices = [plan.name for plan in whole if len(plan.shape) >= 2]
    return ShardedLamb(chunks, config.optimizer, matrices, groups.world)


def _place(coords: Mapping[str, int], parts: Sequence[ModelPart], mesh: Mesh) -> str:
    """In words for the log: which place of each axis, and which layers."""
    axes = ", ".join(f"{axis} {place} of {getattr(mesh, axis)}" for axis, place in coords.items())
    layers = " and ".join(f"{part.layers.start} to {part.layers.stop - 1}" for part in parts)
    has = {"embedding": parts[0].has_embedding, "head": parts[-1].has_head}
    return f"{axes}; {', '.join([f'layers {layers}', *(name for name, is_here in has.items() if is_here)])}"


def _open_data(config: Config, mesh: Mesh, world: World) -> Feed:
    feed, error = None, None
    coords = mesh.coords(world.rank)
    session = world.control.broadcast(secrets.token_hex(4) if world.rank == 0 else None)
    needs_tokens = coords["pp"] in (0, mesh.pp - 1)
    place = ReadingPlace(mesh.dp, coords["dp"], needs_tokens, world.local_rank, world.local_world_size)
    try:
        feed = open_feed(
            config.data,
            config.train,
            vocab_size=config.model.vocab_size,
            place=place,
            agent=_agent_address(process_env(), session),
            is_first=world.rank == 0,
            batches=None if config.parallel.hdp is None else batches_of_plan(config, _plan_of(world)),
            limits=AgentLimits.within(config.launch.timeout_s),
        )
    except HpcTrainError as problem:
        error = problem
    world.agree(error)
    assert feed is not None
    agree_on_reader(feed, world)
    return feed


def _plan_of(world: World) -> Plan:
    assert world.plan is not None, "a run is planned"
    return world.plan


def agree_on_reader(feed: Feed, world: World) -> None:
    """Have the agent read for all ranks of a node or for none: it waits for all. Collective over all ranks.

    Where it comes up at the last moment, some of them may have given it up already.
    """
    readers = world.control.all_gather([world.node_rank, feed.has_agent])
    if feed.has_agent and [world.node_rank, False] in readers:
        feed.leave_agent("other ranks of this node have found no node agent")


def _agent_address(env: Mapping[str, str], session: str) -> AgentAddress | None:
    """Where the driver, if there is one, has started this node's agent."""
    job_key = read_job_key(env)
    return None if job_key is None else AgentAddress(job_key, this_node(env), session)


def _open_metrics(run_dir: Path, config: Config, world: World) -> Metrics | None:
    if world.rank != 0:
        return None
    return Metrics(
        run_dir,
        tensorboard=config.observe.tensorboard,
        num_steps=config.train.steps,
        log_every=config.train.log_every,
    )
