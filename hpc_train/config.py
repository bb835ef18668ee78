"""The whole configuration of a run: frozen sections, checked before anything starts.

Checks never rewrite a field: what was asked is what is saved. How a configuration is read is in config_read.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from hpc_train.config_values import (
    LARGEST_LR,
    LARGEST_ROPE_THETA,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Seed,
    Size,
)


class ModelConfig(Section):
    """A decoder-only transformer.

    `gpt`: LayerNorm, GELU, biases, learned positions. `llama`: RMSNorm, SwiGLU, RoPE, grouped K/V heads.

    block: attention and feed-forward part one behind the other, or beside each other on one norm. attention_window: how
    many tokens a token sees, itself among them: a number, or one for each layer, where null is all before it.
    """

    family: Literal["gpt", "llama"]
    # assumed: more layers than any model has, and few enough to be listed at once.
    num_layers: Annotated[int, Field(gt=0, le=10_000, strict=True)]
    hidden_size: Size
    num_heads: Size
    num_kv_heads: Size | None = None
    ffn_hidden_size: Size | None = None
    vocab_size: Size
    tied_embeddings: bool = False
    block: Literal["serial", "parallel"] = "serial"
    attention_window: int | tuple[int | None, ...] | None = None
    dropout: Fraction = 0.0
    rope_theta: Annotated[float, Field(gt=0, le=LARGEST_ROPE_THETA)] = 10000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    init_std: Annotated[float, Field(gt=0)] = 0.02

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer; None for full attention."""
        if isinstance(self.attention_window, tuple):
            return self.attention_window
        return (self.attention_window,) * self.num_layers

    @property
    def ffn_size(self) -> int:
        """Given, or 4h for gpt and 8h/3 rounded up to a multiple of 64 for llama (as its authors do)."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        if self.family == "gpt":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64

    @field_validator("attention_window", mode="before")
    @classmethod
    def _windows_are_sizes(cls, value: object) -> object:
        sizes = value if isinstance(value, list | tuple) else [value]
        if not all(size is None or (type(size) is int and size > 0) for size in sizes):
            raise ValueError(
                f"model.attention_window={value!r}: give a number of tokens above 0, or a list with such a number or "
                "null for each layer"
            )
        return value

    @model_validator(mode="after")
    def _window_for_each_layer(self) -> ModelConfig:
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"model.attention_window has {len(self.windows)} entries and model.num_layers={self.num_layers}; give "
                "one entry for each layer, or one number for all"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of model.num_heads={self.num_heads}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.kv_heads}"
            )
        if self.family == "gpt" and self.num_kv_heads not in (None, self.num_heads):
            raise ValueError("model.num_kv_heads has no effect in the gpt family; leave it out or use llama")
        if self.family == "llama" and self.head_size % 2:
            raise ValueError(f"RoPE needs an even head size; hidden_size/num_heads is {self.head_size}")
        return self


class HdpConfig(Section):
    """Hybrid data parallelism: sequences are whole documents, and each takes as many ranks of the dp axis as it needs.

    data.seq_len is then the longest sequence, and a step has at most train.global_batch_size times as many tokens.
    planner: who gets what; static: rings of one size for all, the baseline. capacity_tokens: of a rank's micro-batch.
    profile: a file of costs; left out, they are derived from the model's operations. offload: activations of long
    sequences may leave the device as far as copies hide.
    """

    planner: Literal["static", "naive", "balanced"] = "balanced"
    capacity_tokens: Size
    profile: str | None = None
    offload: bool = False


class ParallelConfig(Section):
    """Degrees of the axes; dp left out is what the world size leaves over.

    layers_per_stage: of each (virtual) stage in the model's order; left out, layers are split by cost. virtual_stages:
    model_chunks a stage, in turn. schedule: zero_bubble does weight gradients when a stage would idle. overlap: data
    parallel's communication beside compute. early_updates: every third model_chunk updated in the backward, taken back
    where the global norm then says so; left out, wherever that can be done. gradient_wire: type of dp's gradients on
    their way, summed in fp32.
    tp_tiles: pieces in which transfers of tp run beside the matrix products before or behind them. hdp: see there.
    """

    pp: Positive = 1
    dp: Positive | None = None
    cp: Positive = 1
    tp: Positive = 1
    sequence_parallel: bool = False
    tp_tiles: Positive = 1
    layers_per_stage: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    virtual_stages: Positive = 1
    schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    overlap: bool = True
    early_updates: bool | None = None
    gradient_wire: Literal["fp32", "bf16"] = "fp32"
    hdp: HdpConfig | None = None

    @model_validator(mode="after")
    def _no_cp_so_far(self) -> ParallelConfig:
        if self.cp != 1:
            raise ValueError(f"parallel.cp={self.cp} is not supported by this version: use cp=1")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "parallel.sequence_parallel has no effect with tp=1; leave it out (it is for tp of 2 or more)"
            )
        if self.tp_tiles > 1 and self.tp == 1:
            raise ValueError(
                f"parallel.tp_tiles={self.tp_tiles} has no effect with tp=1; leave it out (it is for tp of 2 or more)"
            )
        return self

    @field_validator("layers_per_stage", mode="before")
    @classmethod
    def _layers_are_listed(cls, value: object) -> object:
        counts = value if isinstance(value, list | tuple) else ()
        if value is None or (counts and all(type(count) is int and count > 0 for count in counts)):
            return value
        raise ValueError(
            f"parallel.layers_per_stage={value!r} is no list of numbers above 0, one for each of pp * virtual_stages "
            "stages: each stage has a layer at least. Use parallel.layers_per_stage=null, which splits by cost"
        )

    @model_validator(mode="after")
    def _layers_for_each_stage(self) -> ParallelConfig:
        if self.layers_per_stage and len(self.layers_per_stage) != self.pp * self.virtual_stages:
            stages = f"parallel.pp={self.pp} stages"
            if self.virtual_stages > 1:
                stages += f" of parallel.virtual_stages={self.virtual_stages} each"
            raise ValueError(
                f"parallel.layers_per_stage has {len(self.layers_per_stage)} numbers and {stages}; give "
                f"{self.pp * self.virtual_stages}, one for each, or leave it out to have the layers split by their cost"
            )
        return self

    @model_validator(mode="after")
    def _chunks_to_update_early(self) -> ParallelConfig:
        if not self.early_updates:
            return self
        if self.virtual_stages < 4:
            raise ValueError(
                f"parallel.early_updates=true has no effect with virtual_stages={self.virtual_stages}: every third "
                "model_chunk behind a stage's first one is updated early. Leave it out (it is for 4 or more)"
            )
        if not self.overlap:
            raise ValueError("parallel.early_updates=true runs beside backwards, which overlap=false rules out")
        return self

    @model_validator(mode="after")
    def _bubble_to_fill(self) -> ParallelConfig:
        if self.schedule == "zero_bubble" and self.pp == 1:
            raise ValueError(
                "parallel.schedule=zero_bubble has no effect with pp=1; leave it out (it is for pp of 2 or more)"
            )
        return self


class SourceConfig(Section):
    """One token dataset of a blend: the path of a .bin/.idx pair without its ending."""

    prefix: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    loss_mask: bool = False


class DataConfig(Section):
    """What is read, in which proportion, and how documents become sequences.

    reader: the node agent, once for all ranks of a node; each rank for itself; or auto, the agent where there is one.
    """

    seq_len: Size
    train: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    heldout: tuple[SourceConfig, ...] = ()
    heldout_fraction: Fraction = 0.0
    long_documents: Literal["split", "truncate", "drop"] = "split"
    allow_changed_blend: bool = False
    reader: Literal["auto", "agent", "rank"] = "auto"

    @model_validator(mode="after")
    def _one_heldout(self) -> DataConfig:
        if self.heldout and self.heldout_fraction:
            raise ValueError("data.heldout and data.heldout_fraction exclude each other; give one of them")
        return self


class TrainConfig(Section):
    """Steps, batch, precision and what happens every so many steps."""

    steps: Positive
    global_batch_size: Size
    micro_batch_size: Size = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    recompute: Literal["none", "selective", "full"] = "none"
    seed: Seed = 1234
    eval_every: NonNegative = 0
    eval_batches: Positive = 8
    log_every: Positive = 10
    gc_every: Positive = 100
    max_skipped_steps: Positive = 10
    peak_flops_per_rank: Annotated[float, Field(gt=0)] | None = None


class OptimizerConfig(Section):
    """AdamW or LAMB with linear warm-up and cosine decay, clipped by the global norm."""

    name: Literal["adamw", "lamb"] = "adamw"
    lr: Annotated[float, Field(gt=0, le=LARGEST_LR)]
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: NonNegative = 0
    decay_steps: Positive | None = None
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0

    @model_validator(mode="after")
    def _lr_order(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}")
        return self


class LocalCopiesConfig(Section):
    """Copies of the state on the nodes' own disks, for quick restarts: of each node on its own and on another one.

    path: a folder that each node has for itself; $NAME in it stands for a variable there. every: steps. keep: saves
    that are kept, beside one that is being written. most_bytes: of a node's folder. send_bytes_per_s: the most that a
    node sends to the other one.
    """

    path: str
    every: Positive
    keep: Literal[1, 2] = 1
    most_bytes: Positive | None = None
    send_bytes_per_s: Positive | None = None

    @field_validator("path")
    @classmethod
    def _is_a_local_path(cls, value: str) -> str:
        if not value.startswith(("/", "$")):
            raise ValueError(
                f"checkpoint.local.path={value} is not a path from / on, nor a variable such as $TMPDIR; give a folder "
                "on each node's own disk"
            )
        return value


class CheckpointConfig(Section):
    """When the state is saved (0: only at the end), how many are kept (0: all), and what a failed save does.

    folder: a folder or URL (hdfs://...) below which each run keeps them, as NAME/ID; left out: in the run folder.
    init_from: a checkpoint or run folder, or a URL, whose weights a run without a checkpoint of its own begins with.
    allow_changed_model: what in the section `model` may differ from what the weights were trained with.
    writer: the node agents, beside the training, or the ranks, which wait; auto: agents while every node has one.
    on_error: whether training goes on without a save that failed; a run is not done without its last one.
    when_busy: what a save does that is due while agents write the one before. write_bytes_per_s: the most that a
    node's agent writes. finish_s: how long agents may write on when the ranks have ended. local: copies on the nodes'
    own disks, from which a run goes on where they are newer and whole; left out, none.
    """

    every: NonNegative = 0
    keep: NonNegative = 0
    at_end: bool = True
    resume: bool = True
    folder: Annotated[str, Field(min_length=1)] | None = None
    init_from: Annotated[str, Field(min_length=1)] | None = None
    allow_changed_model: tuple[Literal["rope_theta", "attention_window", "norm_eps"], ...] = ()
    on_error: Literal["stop", "continue"] = "stop"
    writer: Literal["auto", "agent", "rank"] = "auto"
    when_busy: Literal["wait", "skip"] = "wait"
    write_bytes_per_s: Positive | None = None
    finish_s: Annotated[float, Field(ge=0)] = 600.0
    local: LocalCopiesConfig | None = None

    @model_validator(mode="after")
    def _agents_copy(self) -> CheckpointConfig:
        if self.local is not None and self.writer == "rank":
            raise ValueError(
                "checkpoint.local has no effect with checkpoint.writer=rank, since the node agents make the copies; "
                "leave one of them out"
            )
        return self


class LaunchConfig(Section):
    """How ranks are started, stopped and started again. Everything left out is found on the site.

    stop_signal: what asks for a save and an end, beside TERM. stop_before_s: how long before the time limit the run
    stops by itself; left out, from the measured times of steps and saves. requeue: when the batch script puts the job
    back into the queue. max_stalled: attempts in a row without a new checkpoint, after which it is not started again.
    wrap: words before each rank's command, such as `apptainer exec image.sif`; rank_python: the Python behind them.
    srun_options: added to the ranks' srun line. stage_env: bring the Python environment to a local disk of each node
    first, under stage_dir.
    """

    runs_dir: str = "runs"
    mpi: str | None = None
    interface: str | None = None
    address_template: str | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    bind: Literal["auto", "none"] = "auto"
    num_threads: Positive | None = None
    modules: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    stop_signal: Literal["USR2", "USR1", "URG", "WINCH"] = "USR2"
    stop_before_s: Annotated[float, Field(gt=0)] | None = None
    requeue: Literal["interrupted", "failed", "never"] = "interrupted"
    max_requeues: NonNegative = 100
    max_stalled: Positive = 3
    wrap: tuple[str, ...] = ()
    rank_python: str | None = None
    srun_options: tuple[str, ...] = ()
    stage_env: bool = False
    stage_dir: str | None = None


class FabricConfig(Section):
    """Where the nodes stand in the network, and how ranks are laid over it.

    source: files (several are merged, with commas between them) or `clos:...`; left out, what Slurm tells is used.
    order: `auto` lets the plan choose, `slurm` leaves the ranks alone, or the axes from the innermost to the outermost,
    such as `tp,dp,pp,cp`. exclude: nodes (a host list) that get no ranks. gpu_memory_bytes: what a plan has to fit in.
    """

    source: str | None = None
    order: str = "auto"
    exclude: str | None = None
    gpu_memory_bytes: Positive | None = None

    @model_validator(mode="after")
    def _order_is_known(self) -> FabricConfig:
        axes = ["pp", "dp", "cp", "tp"]
        if self.order not in ("auto", "slurm") and sorted(self.order.split(",")) != sorted(axes):
            raise ValueError(
                f"fabric.order={self.order} is neither auto nor slurm nor the four axes from the innermost to the "
                "outermost; write for example fabric.order=tp,dp,pp,cp"
            )
        return self


class ObserveConfig(Section):
    """What is written beside metrics.jsonl and the logs of nodes. rank_logs: also a log file for each rank.

    trace: times of segments, a file for each rank. trace_steps: first and last step; null for all. trace_max_segments:
    of a rank and attempt, 72 bytes each; later ones are only counted (assumed: 1000 steps of 100 are enough).
    """

    tensorboard: bool = False
    rank_logs: bool = False
    trace: bool = True
    trace_steps: tuple[Positive, Positive] | None = None
    trace_max_segments: Positive = 100_000

    @field_validator("trace_steps", mode="before")
    @classmethod
    def _first_and_last(cls, value: object) -> object:
        given = list(value) if isinstance(value, list | tuple) else [value]
        steps = [step for step in given if type(step) is int]
        if value is None or (isinstance(value, list | tuple) and len(steps) == len(value) == 2 and min(steps) > 0):
            return value
        if isinstance(value, str) and (written := re.fullmatch("([0-9]{1,9})[-,]([0-9]{1,9})", value)):
            steps = [int(step) for step in written.groups()]  # as for trace --steps
        begin = [1] if given[:1] == [None] else []
        steps = [max(1, step) for step in begin + steps] or [1]
        raise ValueError(
            f"observe.trace_steps={value!r} is not the first and the last step. Use observe.trace_steps="
            f"[{min(steps)},{max(steps)}], or null for all"
        )

    @model_validator(mode="after")
    def _steps_in_order(self) -> ObserveConfig:
        if self.trace_steps is not None and self.trace_steps[0] > self.trace_steps[1]:
            first, last = self.trace_steps
            raise ValueError(f"observe.trace_steps={[first, last]} has no step in it; write [{last}, {first}]")
        return self


class Config(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    model: ModelConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    fabric: FabricConfig = Field(default_factory=FabricConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if self.train.eval_every and not (self.data.heldout or self.data.heldout_fraction):
            raise ValueError(
                "train.eval_every is set but there is no held-out data: give data.heldout or data.heldout_fraction"
            )
        traced = self.observe.trace_steps
        if traced is not None and traced[0] > self.train.steps:
            raise ValueError(
                f"observe.trace_steps={list(traced)} begins behind the last step, train.steps={self.train.steps}, so "
                f"that nothing would be recorded. Use observe.trace_steps=[1,{self.train.steps}], or null for all"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_updates_early(self) -> Config:
        if self.parallel.early_updates and self.optimizer.name == "lamb":
            raise ValueError(
                "parallel.early_updates=true is not possible with optimizer.name=lamb, which needs the norms of whole "
                "parameters from all ranks before it updates any; leave it out, or use adamw"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_by_tokens(self) -> Config:
        if self.parallel.hdp is not None and self.train.micro_batch_size != 1:
            raise ValueError(
                f"train.micro_batch_size={self.train.micro_batch_size} has no effect with parallel.hdp, whose "
                "micro-batches have up to capacity_tokens; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _windows_within_sequences(self) -> Config:
        seq_len = self.data.seq_len
        longer = [(layer, size) for layer, size in enumerate(self.model.windows) if size and size > seq_len]
        if longer:
            layer, size = longer[0]
            raise ValueError(
                f"model.attention_window={size} of layer {layer} is longer than data.seq_len={seq_len}. Use {seq_len} "
                "or less, or null for full attention"
            )
        return self
