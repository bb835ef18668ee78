"""The NCCL settings that a placement wants, each with its reason. Who sets them leaves alone what the user has set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.cluster.fabric import Fabric
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.ecmp import estimate_ecmp
from hpc_train.plan.placement import Placement
from hpc_train.plan.traffic import LEAF, SPINE, Routed, route

QUEUE_PAIRS_TRIED = (1, 2, 4, 8)
# assumed: a doubling of the queue pairs, which costs memory and messages, should win a tenth of the busiest link.
WORTH_DOUBLING = 0.9
# derived: NCCL waits 4.096 us * 2**n (its manual), so 22 is 17 s, and seven tries 120 s. MegaScale (NSDI'24) says that
# a link which flaps is down for some seconds and that the default ends a run before it is back, but not its values.
TIMEOUT_EXPONENT, RETRIES = 22, 7


@dataclass(frozen=True)
class NcclSetting:
    """An environment variable, its value, and why the plan wants it."""

    name: str
    value: str
    reason: str


def nccl_settings(
    placement: Placement, fabric: Fabric | None, traffic: Sequence[AxisTraffic]
) -> tuple[NcclSetting, ...]:
    """What a placement wants of NCCL; nothing where no fabric is known or no rank talks to another node."""
    if fabric is None:
        return ()
    routed = route(placement, fabric, traffic)
    if not (routed.tier >= LEAF).any():
        return ()
    found = _cross_nic(routed, fabric)
    if (routed.tier >= SPINE).any():
        found += _queue_pairs(placement, fabric, traffic)
    waited_s = 4.096e-6 * 2**TIMEOUT_EXPONENT
    found += [
        NcclSetting(
            "NCCL_IB_TIMEOUT",
            str(TIMEOUT_EXPONENT),
            f"a link that flaps is down for some seconds: {waited_s:.0f} s are waited for each of {RETRIES} tries, "
            f"{waited_s * RETRIES:.0f} s in all",
        ),
        NcclSetting("NCCL_IB_RETRY_CNT", str(RETRIES), "as often as the hardware can; with the timeout above"),
    ]
    return tuple(found)


def unset(settings: Sequence[NcclSetting], environment: Mapping[str, str]) -> tuple[NcclSetting, ...]:
    """Those of the settings that the user's environment does not have."""
    return tuple(setting for setting in settings if setting.name not in environment)


def _cross_nic(routed: Routed, fabric: Fabric) -> list[NcclSetting]:
    """Off where no transfer changes the rail; else NCCL's own default is left, which may use another card."""
    leaves_node = routed.tier >= LEAF
    sender, receiver = routed.transfers.sender[leaves_node], routed.transfers.receiver[leaves_node]
    rail = routed.places.rail
    if (routed.end(rail, sender) != routed.end(rail, receiver)).any():
        return []
    assumed = "" if fabric.are_rails_known else ", rail i being assumed for GPU i"
    reason = f"all {len(sender)} transfers between nodes stay on their rail{assumed}: no ring has to change cards"
    return [NcclSetting("NCCL_CROSS_NIC", "0", reason)]


def _queue_pairs(placement: Placement, fabric: Fabric, traffic: Sequence[AxisTraffic]) -> list[NcclSetting]:
    """As many queue pairs as still make the busiest link clearly less busy."""
    estimates = {count: estimate_ecmp(placement, fabric, traffic, flows_a_pair=count) for count in QUEUE_PAIRS_TRIED}
    if not estimates[1].uplinks:
        return []
    chosen = 1
    for count in QUEUE_PAIRS_TRIED[1:]:
        if estimates[count].expected_collision > WORTH_DOUBLING * estimates[chosen].expected_collision:
            break
        chosen = count
    if chosen == 1:
        return []
    before, after = estimates[1].expected_collision, estimates[chosen].expected_collision
    reason = (
        f"with one flow a connection the busiest link of an uplink carries {before:.1f} times its even share, with "
        f"{chosen} flows {after:.1f} times (hashed onto the links)"
    )
    split = "the bytes of each message are spread over the queue pairs, not one message after another"
    return [
        NcclSetting("NCCL_IB_QPS_PER_CONNECTION", str(chosen), reason),
        NcclSetting("NCCL_IB_SPLIT_DATA_ON_QPS", "1", split),
    ]
