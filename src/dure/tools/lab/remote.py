"""ssh between the places of a lab, with keys of the lab's own."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from dure.base.errors import DureError
from dure.tools.lab.machine import SETUP_SECONDS, run
from dure.tools.lab.place import Place

_SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_LOOK_SECONDS = 0.01
_PORT = 22
_LISTENS = "0A"
"""The kernel's word for it, in /proc/net/tcp."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_no_ssh() -> str | None:
    """Why places cannot be reached by ssh, or None."""
    missing = [name for name in ("sshd", "ssh", "ssh-keygen") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed (Debian: openssh-server, openssh-client)" if missing else None


def prepare(folder: Path, addresses: Mapping[str, str], lab: str) -> None:
    """Make keys and configurations for all places."""
    _make_key(folder / "id_ed25519", f"dure-lab-{lab}")
    shutil.copyfile(folder / "id_ed25519.pub", folder / "authorized_keys")
    known = []
    for name, address in addresses.items():
        key = folder / f"host_key_{name}"
        _make_key(key, name)
        kind, words, _ = key.with_name(f"{key.name}.pub").read_text().split()
        known.append(f"{name},{address} {kind} {words}\n")
        (folder / f"sshd_config_{name}").write_text(_server(folder, name, address, lab))
    (folder / "known_hosts").write_text("".join(known))
    (folder / "ssh_config").write_text(_client(folder))


def start(folder: Path, place: Place, lab: str) -> None:
    """Start the place's sshd, and wait until it listens; it ends with the place."""
    log = folder / f"sshd_{place.host}.log"
    config = folder / f"sshd_config_{place.host}"
    run(place.command(lab, [shutil.which("sshd") or "sshd", "-f", str(config), "-E", str(log)]))
    # It goes into the background first, and listens then: whoever came in between would be refused.
    deadline = time.monotonic() + SETUP_SECONDS
    while not _is_listened_to(place, _PORT):
        if time.monotonic() > deadline:
            said = log.read_text(errors="replace").strip() if log.exists() else ""
            raise DureError(f"{place.host}: sshd does not listen after {SETUP_SECONDS:.0f} s: {said}")
        time.sleep(_LOOK_SECONDS)


def _is_listened_to(place: Place, port: int) -> bool:
    """Whether somebody in a place listens at a port; asked of the kernel, so that nobody is called for it."""
    _, *sockets = Path(f"/proc/{place.pid}/net/tcp").read_text().splitlines()
    fields = [line.split() for line in sockets]
    return any(own.endswith(f":{port:04X}") and state == _LISTENS for _, own, _, state, *_ in fields)


def client_config(folder: Path) -> tuple[Path, str] | None:
    """The ssh configuration, and where a place has it so that plain `ssh node1` finds it."""
    return (folder / "ssh_config", _SYSTEM_CONFIG) if os.path.exists(_SYSTEM_CONFIG) else None


def _make_key(path: Path, comment: str) -> None:
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def _server(folder: Path, name: str, address: str, lab: str) -> str:
    """One place's sshd. Its sessions find the interpreter that made the lab, as they would on a real cluster."""
    environment = {"DURE_LAB": lab, "PATH": f"{Path(sys.executable).parent}:{_PATH}"}
    if "PYTHONPATH" in os.environ:
        paths = os.environ["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
    settings = " ".join(f'"{key}={value}"' for key, value in environment.items())
    return f"""ListenAddress {address}:{_PORT}
HostKey {folder}/host_key_{name}
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 100
MaxSessions 100
SetEnv {settings}
Subsystem sftp internal-sftp
"""


def _client(folder: Path) -> str:
    return f"""Host *
  User root
  IdentityFile {folder}/id_ed25519
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
  LogLevel ERROR
"""
