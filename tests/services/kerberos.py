"""A Kerberos of our own, and an HDFS that asks for its tickets: MIT's KDC, from Debian's krb5-kdc and krb5-user."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.ports import unused_ports
from tests.processes import die_with_parent
from tests.services.hdfs import HdfsCluster

Cluster = TypeVar("Cluster", bound=HdfsCluster)

REALM = "HPC.TEST"
_PROGRAMS = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_START_S = 30.0


def skip_reason() -> str | None:
    """Why there can be no Kerberos here; None where there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"{', '.join(missing)} missing (env/setup_system.sh)" if missing else None


class Kdc:
    """Gives tickets for `localhost`. Ends with `stop`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kdc-"))
        (self._port,) = unused_ports(1)
        self.conf = self.folder / "krb5.conf"
        self.conf.write_text(_CONF.format(realm=REALM, port=self._port, skew_s=1))
        # A server that starts may take more than a second to look at what it was sent.
        self.server_conf = self.folder / "server.conf"
        self.server_conf.write_text(_CONF.format(realm=REALM, port=self._port, skew_s=300))
        (self.folder / "kdc.conf").write_text(_KDC_CONF.format(realm=REALM, port=self._port, folder=self.folder))
        self._run("kdb5_util", "create", "-s", "-r", REALM, "-P", "of a test")
        self._process = subprocess.Popen(
            [self._program("krb5kdc"), "-n"], env=self._environment(), preexec_fn=die_with_parent
        )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert time.monotonic() < deadline and self._process.poll() is None, "the KDC does not come up"
            time.sleep(0.02)

    def keytab(self, *principals: str) -> Path:
        """A file with the keys of principals, which are made with it."""
        path = self.folder / f"{principals[0].replace('/', '-')}.keytab"
        for name in principals if not path.exists() else ():
            self._run("kadmin.local", "-r", REALM, "addprinc", "-randkey", name)
            self._run("kadmin.local", "-r", REALM, "ktadd", "-k", str(path), name)
        return path

    def kinit(self, keytab: Path, principal: str, cache: Path, lifetime_s: int) -> None:
        """A ticket for so long, in this cache."""
        lifetime = ["-l", f"{lifetime_s}s"]
        self._run("kinit", "-c", str(cache), "-k", "-t", str(keytab), *lifetime, f"{principal}@{REALM}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def _program(self, name: str) -> str:
        found = shutil.which(name, path=_PATH)
        assert found is not None, name
        return found

    def _environment(self) -> dict[str, str]:
        told = {"KRB5_CONFIG": str(self.conf), "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf")}
        return {**os.environ, **told}

    def _run(self, name: str, *words: str) -> None:
        done = subprocess.run([self._program(name), *words], env=self._environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"{name} {' '.join(words)}: {done.stdout}{done.stderr}"


def secure_hdfs(kdc: Kdc, make: Callable[..., Cluster] = HdfsCluster) -> Cluster:
    """An HDFS that asks for tickets of the KDC; not started. Whoever has the ticket of `hdfs/localhost` may all."""
    keytab = kdc.keytab("hdfs/localhost", "HTTP/localhost")
    core = {
        "hadoop.security.authentication": "kerberos",
        "hadoop.security.authorization": "true",
        "hadoop.security.auth_to_local": f"RULE:[2:$1@$0](hdfs@{REALM})s/.*/{_user()}/ DEFAULT",
    }
    hdfs = {
        "dfs.block.access.token.enable": "true",
        "dfs.web.authentication.kerberos.principal": f"HTTP/localhost@{REALM}",
        "dfs.web.authentication.kerberos.keytab": keytab,
        # A data node of a site takes ports that root alone may take, which proves who it is.
        "ignore.secure.ports.for.testing": "true",
    }
    for kind in ("namenode", "datanode"):
        hdfs |= {
            f"dfs.{kind}.kerberos.principal": f"hdfs/localhost@{REALM}",
            f"dfs.{kind}.keytab.file": keytab,
            f"dfs.{kind}.kerberos.internal.spnego.principal": f"HTTP/localhost@{REALM}",
        }
    options = [f"-Djava.security.krb5.conf={kdc.server_conf}"]
    return make(num_data_nodes=1, address="localhost", core=core, hdfs=hdfs, java_options=options)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


_CONF = """\
[libdefaults]
    default_realm = {realm}
    dns_lookup_realm = false
    dns_lookup_kdc = false
    dns_canonicalize_hostname = false
    rdns = false
    udp_preference_limit = 1
    clockskew = {skew_s}
[realms]
    {realm} = {{
        kdc = 127.0.0.1:{port}
    }}
"""

_KDC_CONF = """\
[kdcdefaults]
    kdc_ports = ""
    kdc_listen = ""
    kdc_tcp_listen = 127.0.0.1:{port}
[realms]
    {realm} = {{
        database_name = {folder}/principal
        key_stash_file = {folder}/stash
        max_life = 24h
        max_renewable_life = 7d
    }}
"""
