"""The lab's part that is a program of its own: the first process of a place, and the way into it.

    python -I -S namespaces.py init            reads its order, a message of `base.lines`, from standard input
    python -I -S namespaces.py enter PID STARTED LAB -- COMMAND …

A place is a set of namespaces without a name in the file system: they last as long as a process is in them. `init`
is that process. Where the place counts its processes by itself (a PID namespace) it is process 1, and the kernel
ends all others with it. It ends when its standard input does, unless it was told to `stay`: a lab that is not
finished, or that belongs to a process, goes away with whoever makes it, kill -9 included.

This file needs nothing but the standard library and `base.lines`, and is run by its path: it starts in some hundredths
of a second, and it does not matter where `dure` is installed.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

if __name__ == "__main__":  # run by its path, without `site`: the package is where this file is
    sys.path.insert(0, os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from dure.base.lines import Lines, decode, encode

_MOUNTS, _NAMES, _IPC, _PROCESSES, _NETWORK = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_KINDS = {"net": _NETWORK, "uts": _NAMES, "ipc": _IPC, "mnt": _MOUNTS}
_READ_ONLY, _REMOUNT, _BIND, _WITH_THOSE_BELOW, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
UP, FAILED, STAY = "Up", "Failed", "Stay"
"""From a place that is made, or cannot be; to one that shall outlive whoever made it."""
_ORDER_SECONDS = 60.0
_FAILED, _NOT_EXECUTABLE, _NOT_FOUND = 125, 126, 127

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: Sequence[str]) -> int:
    """Do what the first argument says."""
    if arguments[0] == "init":
        maker = Lines(0, 1)
        return init(maker, decode(maker.next(_ORDER_SECONDS))[1])
    pid, started, lab, _, *command = arguments[1:]
    return enter(int(pid), int(started), lab, command)


def init(maker: Lines, order: dict[str, Any]) -> int:
    """Make a place, say its first process's number, and stay until the end.

    `order`: host (its name), hosts (its /etc/hosts), processes (whether it counts its own), covers (folders that are
    empty in the place but for some), binds (from, to, whether writable).
    """
    try:
        _checked(_libc.unshare(sum(_KINDS.values()) | (_PROCESSES if order["processes"] else 0)), "unshare")
        first = os.fork() if order["processes"] else 0
        if first:
            os._exit(0)
        number = os.readlink("/proc/self")  # as the outside counts: this /proc is still the outside's
        socket.sethostname(order["host"])
        _arrange(order)
    except OSError as error:
        maker.send(encode(FAILED, {"why": str(error)}))
        return 1
    maker.send(encode(UP, {"pid": int(number)}))
    _stay(maker)
    return 0


def start_time(pid: int | str) -> int:
    """When a process began, in the kernel's ticks since the machine did; with the pid it is unique. 0: it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def enter(pid: int, started: int, lab: str, command: Sequence[str]) -> int:
    """Run a command in the place whose first process is `pid`, as if it were this process: signals, terminal, end."""
    here = os.getcwd()
    try:
        spaces = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("pid", *_KINDS)}
        if start_time(pid) != started:
            raise ProcessLookupError
    except (FileNotFoundError, ProcessLookupError):
        return _complain("the place is gone; `dure lab status` says what is left of the lab", _FAILED)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    in_front = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    _checked(_libc.setns(spaces["pid"], _PROCESSES), "setns")
    alive, sign_of_life = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        os.close(sign_of_life)
        _checked(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")
        # Whoever is its parent is out of its sight, so getppid() is 0 even when that is not us any more.
        if select.select([alive], [], [], 0)[0]:
            os._exit(_FAILED)
        for kind, flag in _KINDS.items():
            _checked(_libc.setns(spaces[kind], flag), "setns")
        _become(command, here, before, lab, in_front)
    return _attend(child, in_front)


def _arrange(order: dict[str, Any]) -> None:
    """Mount what the place has of its own."""
    _mount("none", "/", None, _PRIVATE | _WITH_THOSE_BELOW)
    if order["processes"]:
        _mount("proc", "/proc", "proc")
    _fresh_sys()
    _give_names(order["hosts"])
    sources = [os.open(source, os.O_PATH) for source, _, _ in order["binds"]]  # they may be covered soon
    for folder, kept, mode in order["covers"]:
        _cover(folder, kept, mode)
    for descriptor, (source, target, writable) in zip(sources, order["binds"], strict=True):
        _bind(descriptor, os.path.isdir(f"/proc/self/fd/{descriptor}"), target)
        if not writable:
            _mount(source, target, None, _REMOUNT | _BIND | _READ_ONLY)


def _give_names(hosts: str) -> None:
    """Lay a file over /etc/hosts. It is in a file system that the place's own /dev/shm will cover: out of sight, and
    yet not removed, for nothing can be mounted over a file that is."""
    _mount("tmpfs", "/dev/shm", "tmpfs", data="mode=0755")
    with open("/dev/shm/hosts", "x") as file:
        file.write(hosts)
    _bind(os.open(file.name, os.O_PATH), False, "/etc/hosts")


def _fresh_sys() -> None:
    """/sys/class/net shows the interfaces of whoever mounted it."""
    groups = "/sys/fs/cgroup"
    descriptor = os.open(groups, os.O_PATH) if os.path.isdir(groups) else None
    _mount("sysfs", "/sys", "sysfs")
    if descriptor is not None:
        _bind(descriptor, True, groups)


def _cover(folder: str, kept: Sequence[str] | None, mode: str) -> None:
    """Lay an empty file system over a folder, and put those entries back that are kept; None: all of them."""
    paths = [os.path.join(folder, name) for name in os.listdir(folder)] if kept is None else kept
    held = [(path, os.open(path, os.O_PATH), os.path.isdir(path)) for path in paths if os.path.exists(path)]
    _mount("tmpfs", folder, "tmpfs", data=f"mode={mode}")
    for path, descriptor, is_folder in held:
        _bind(descriptor, is_folder, path)


def _bind(descriptor: int, is_folder: bool, target: str) -> None:
    if not os.path.exists(target):
        os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
        if not is_folder:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(f"/proc/self/fd/{descriptor}", target, None, _BIND | _WITH_THOSE_BELOW)
    os.close(descriptor)


def _mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode())
    _checked(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[4]), f"mount {target}")


def _stay(maker: Lines) -> None:
    """Reap orphans until standard input ends, or, once told to stay, for ever."""
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    watched = [0, wake]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if wake in ready:
            os.read(wake, 4096)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
        if 0 in ready:
            if encode(STAY).rstrip() not in maker.receive():
                if maker.closed:
                    return
                continue
            watched.remove(0)
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nothing, stream)


def _become(
    command: Sequence[str], here: str, mask: set[int | signal.Signals], lab: str, in_front: bool
) -> NoReturn:
    """Turn into the command: in the same folder, in front of the terminal if that is where we are."""
    # In a group of its own, it gets each signal once: from the terminal, or from us.
    os.setpgid(0, 0)
    if in_front:
        os.tcsetpgrp(0, os.getpid())  # signals are blocked, so the terminal does not stop us for asking
    os.environ["DURE_LAB"] = lab
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)  # Python ignores them, and what is ignored stays so
    try:
        os.chdir(here)
    except OSError:
        os._exit(
            _complain(f"{here} is not there in this place, which has its own /tmp; cd elsewhere", _FAILED)
        )
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], list(command))
    except FileNotFoundError:
        os._exit(_complain(f"there is no command {command[0]}", _NOT_FOUND))
    except OSError as error:
        os._exit(_complain(f"{command[0]}: {error.strerror}", _NOT_EXECUTABLE))


def _attend(child: int, in_front: bool) -> int:
    """Hand every signal on, stop and go on together, and end as the child ends."""
    every = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    while True:
        name = signal.sigwaitinfo(every).si_signo
        if name != signal.SIGCHLD:
            if name == signal.SIGCONT and in_front:
                os.tcsetpgrp(0, os.getpgid(child))
            os.kill(child, name)  # not yet waited for, so the number is still the child's
            continue
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            continue
        if in_front:
            os.tcsetpgrp(0, os.getpgrp())
        if os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)
            continue
        if os.WIFSIGNALED(status):
            _end_by(os.WTERMSIG(status))
        return os.waitstatus_to_exitcode(status)


def _end_by(name: int) -> None:
    """End by a signal, so that whoever waits for this process sees what it would have seen of the command."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the command has left its core, if any
    if name != signal.SIGKILL:
        signal.signal(name, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {name})
    os.kill(os.getpid(), name)


def _complain(text: str, code: int) -> int:
    os.write(2, f"dure: lab: {text}\n".encode())
    return code


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
