"""Sleeping on a word of shared memory until somebody changes it: Linux's futex, through ctypes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_WAIT, _WAKE = 0, 1  # without the private flag: the word is shared between processes
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The two calls, bound once; they release the GIL while they wait."""

    def __init__(self) -> None:
        number = _NUMBERS.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, f"no futex known on {platform.machine()}")
        self._number = number
        library = ctypes.CDLL(None, use_errno=True)
        self._syscall = library.syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = (
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int,
        )

    def wait(self, address: int, value: int, seconds: float) -> None:
        """Sleep while the word at `address` is `value`, at most so long; may return early."""
        limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
        if self._syscall(self._number, address, _WAIT, value, ctypes.addressof(limit), None, 0) == -1:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, os.strerror(code))

    def wake(self, address: int) -> None:
        """Wake everyone who sleeps on this word."""
        self._syscall(self._number, address, _WAKE, 2**31 - 1, None, None, 0)
