"""What the plan wants of NCCL in the ranks' environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.launch import run_folder
from hpc_train.launch.driver import rank_environment
from hpc_train.launch.ranks import SrunLauncher
from hpc_train.launch.site import Site
from hpc_train.plan.nccl_settings import NcclSetting
from tests.plan.reports import make_config

WANTED = (NcclSetting("NCCL_CROSS_NIC", "0", "rails"), NcclSetting("NCCL_IB_TIMEOUT", "22", "links flap"))


@pytest.mark.parametrize(
    ("env", "launch_env", "value", "line"),
    [
        ({}, {}, "0", "NCCL_CROSS_NIC=0 (was not set)"),
        ({"NCCL_CROSS_NIC": "2"}, {}, "2", "NCCL_CROSS_NIC=2 (kept; the default would be 0)"),
        ({}, {"NCCL_CROSS_NIC": "1"}, "1", "NCCL_CROSS_NIC=1 (was not set)"),
    ],
)
def test_what_the_user_has_set_in_any_place_stays(
    tmp_path: Path, env: dict[str, str], launch_env: dict[str, str], value: str, line: str
) -> None:
    config = make_config(launch={"env": launch_env})
    site = Site(SrunLauncher(1, "pmix", False, 60), {}, 1, "a test")
    claim = run_folder.Claim(tmp_path, run_folder.this_process("here"), None)
    filled, lines = rank_environment(env, config, site, claim, 1, WANTED)
    assert (filled["NCCL_CROSS_NIC"], filled["NCCL_IB_TIMEOUT"]) == (value, "22")
    assert line in lines
