"""Begin a run from the weights of another one or of a converted model: no optimizer state, step or data position."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpc_train.checkpoint.folders.find import find_checkpoint, told_model
from hpc_train.checkpoint.format.manifest import Manifest, parse_manifest, read_manifest
from hpc_train.checkpoint.format.model_function import require_function
from hpc_train.checkpoint.format.model_tensors import MODEL_PREFIX, ModelSpec, require_model
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.loading.fill import fill
from hpc_train.checkpoint.loading.needs import plan_loading
from hpc_train.checkpoint.stores.bounded import bounded
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.cluster.agent_wait import USUAL_LIMITS, AgentLimits
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.log import say, warn


def load_weights(
    source: str,
    pieces: Sequence[StatePiece],
    spec: ModelSpec,
    world: World,
    allowed: Collection[str] = (),
    limits: AgentLimits = USUAL_LIMITS,
) -> Location:
    """Fill the pieces of the model from a checkpoint, or from a run's newest; the others are left alone. Collective.

    Weights stored in another type are converted. Gives the checkpoint's path. allowed: as of `require_function`.
    limits: how long a store is waited for in which nothing moves.

    Raises:
        CheckpointError: on every rank: there is none, it is damaged, or it is of another model.
    """

    def look() -> list[str]:
        found = find_checkpoint(place)
        manifest = read_manifest(found)
        require_model(found, manifest, spec)
        _compare(found, manifest, spec, allowed)
        return [str(found), manifest.to_json()]

    told, error = None, None
    if world.rank == 0:
        try:
            place = locate(source)
            told = bounded(place, look, f"looking for a checkpoint on {world.node}", Bound(limits.save_s))
        except HpcTrainError as problem:
            error = CheckpointError(f"checkpoint.init_from: {problem}")
    world.agree(error)
    told = world.control.broadcast(told)
    path = locate(told[0])
    of_model = [piece for piece in pieces if piece.name.startswith(MODEL_PREFIX)]
    damage = fill(plan_loading(path, parse_manifest(told[1], path), of_model, world, exact=False), world, limits)
    world.agree(CheckpointError(f"checkpoint.init_from: {damage}") if damage and world.rank == 0 else None)
    return path


def _compare(found: Location, manifest: Manifest, spec: ModelSpec, allowed: Collection[str]) -> None:
    told = told_model(found, manifest)
    if told is None:
        warn(f"{found} does not say of which model it is: names and shapes of its weights are right, no more is known")
        return
    for change in require_function(found, told, spec, allowed):
        say(f"{change} (checkpoint.allow_changed_model)")
