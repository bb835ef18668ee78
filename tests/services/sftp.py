"""A real SFTP server: OpenSSH's, from Debian's openssh-server, with keys of its own, on this host alone."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.ports import unused_ports
from tests.processes import die_with_parent, kill_tree
from tests.services.wait import wait_for_port

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])


def skip_reason() -> str | None:
    """Why there can be no server here; None where there can."""
    missing = [name for name in ("sshd", "ssh-keygen") if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} missing (env/setup_system.sh)"
    return None if os.geteuid() == 0 else "OpenSSH's server wants root's /run/sshd"


class SftpServer:
    """Answers from the moment it is made until `stop`. options: what its client needs beside the URL."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sftp-"))
        self.data = self.folder / "data"
        self.data.mkdir()
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it goes before anybody is known to it
        (self._port,) = unused_ports(1)
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True, timeout=60
            )
        conf = self.folder / "sshd_config"
        conf.write_text(_CONF.format(port=self._port, folder=self.folder))
        self.url = f"sftp://{pwd.getpwuid(os.geteuid()).pw_name}@127.0.0.1:{self._port}{self.data}"
        self.options = {"key_filename": str(self.folder / "user"), "look_for_keys": False, "allow_agent": False}
        self.start()

    def start(self) -> None:
        program = shutil.which("sshd", path=_PATH)
        assert program is not None
        command = [program, "-D", "-f", str(self.folder / "sshd_config"), "-E", str(self.folder / "log")]
        self._process = subprocess.Popen(command, preexec_fn=die_with_parent)
        wait_for_port(self._port, self._process)

    def kill(self) -> None:
        """With all connections; `start` brings it back."""
        kill_tree(self._process.pid)
        self._process.wait()

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


_CONF = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
"""
