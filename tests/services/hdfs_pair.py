"""A real HDFS with two name nodes, of which one is active and the other one stands by, as large sites have it."""

from __future__ import annotations

import atexit
import shutil
from typing import Any, Literal

from tests.ports import unused_ports
from tests.services.hdfs import HdfsCluster

Name = Literal["one", "two"]
SERVICE = "pair"
"""In hdfs://pair/, which no name server knows: what Hadoop's configuration says of it is all there is."""

_NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_HA_ADMIN = "org.apache.hadoop.hdfs.tools.DFSHAAdmin"
_FAILOVER = "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"


class HdfsPair(HdfsCluster):
    """Name nodes `one` and `two`; which of them is active is up to `activate`: nothing fails over by itself.

    settings: as of one name node.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.active: Name = "one"
        ports = unused_ports(4)
        self._ports_of: dict[Name, list[int]] = {"one": ports[:2], "two": ports[2:]}
        self._ports = ports[:2]
        self._core = {**self._core, "fs.defaultFS": self.url}
        self._hdfs = {
            **self._hdfs,
            "dfs.namenode.rpc-address": None,
            "dfs.namenode.http-address": None,
            "dfs.nameservices": SERVICE,
            f"dfs.ha.namenodes.{SERVICE}": ",".join(self._ports_of),
            f"dfs.client.failover.proxy.provider.{SERVICE}": _FAILOVER,
            "dfs.namenode.shared.edits.dir": f"file://{self.folder}/shared",
            "dfs.ha.tail-edits.period": 1,
            "dfs.ha.log-roll.period": 1,
            "dfs.ha.fencing.methods": "shell(/bin/true)",
        }
        for name, (rpc, http) in self._ports_of.items():
            self._hdfs[f"dfs.namenode.rpc-address.{SERVICE}.{name}"] = f"{self._address}:{rpc}"
            self._hdfs[f"dfs.namenode.http-address.{SERVICE}.{name}"] = f"{self._address}:{http}"
            self._hdfs[f"dfs.namenode.name.dir.{SERVICE}.{name}"] = f"{self.folder}/name-{name}"

    @property
    def authority(self) -> str:
        return SERVICE

    @property
    def standby(self) -> Name:
        """The one that is not active: it stands by, or was killed."""
        return "two" if self.active == "one" else "one"

    def address_of(self, name: Name) -> str:
        """HOST:PORT of one name node by itself, which may be standing by."""
        return f"{self._address}:{self._ports_of[name][0]}"

    @property
    def http_addresses(self) -> str:
        return ",".join(f"{self._address}:{http}" for _, http in self._ports_of.values())

    def start(self) -> None:
        """As of one name node; `one` is active afterwards, and `two` stands by."""
        atexit.register(self.stop)
        self._write_configuration()
        self.run(_NAME_NODE, *_is("one"), "-format", "-nonInteractive", "-force")
        shutil.copytree(self.folder / "name-one", self.folder / "name-two")
        for index in range(self._num_data_nodes):
            self.start_data_node(index)
        for name in self._ports_of:
            self._start(name, _NAME_NODE, *_is(name))
        for name in self._ports_of:
            self._wait_for(name)
        self.activate("one")

    def kill_active(self) -> None:
        self._kill(self.active)

    def start_standby(self) -> None:
        """Start the one that was killed again."""
        self._start(self.standby, _NAME_NODE, *_is(self.standby))
        self._wait_for(self.standby)

    def activate(self, name: Name) -> None:
        """Make a name node the active one, and wait until it serves. The other one is dead, or stands by."""
        self.run(_HA_ADMIN, "-transitionToActive", "--forceactive", name)  # though the other one may not answer
        self._wait_for(name)
        self.active = name

    def stand_by(self) -> None:
        """None is active then."""
        self.run(_HA_ADMIN, "-transitionToStandby", self.active)

    def _wait_for(self, name: Name) -> None:
        self._ports = self._ports_of[name]
        self.wait(lambda state: state["NumLiveDataNodes"] == self._num_data_nodes and state["FSState"] == "Operational")


def _is(name: Name) -> list[str]:
    """Who a name node is: both have one address, by which they would find out."""
    return [f"-Ddfs.ha.namenode.id={name}"]
