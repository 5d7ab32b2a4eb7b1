"""Orders the memory accesses of a process that writes rarely with those of many that read often.

The writer pays with a system call, membarrier(2): when it returns, every registered process has run
through a full memory barrier. Readers then need no barrier of their own.
"""

from __future__ import annotations

import ctypes
import os
import platform

from embedserve.deltas.mappings import libc

_NUMBERS = {"x86_64": 324, "aarch64": 283}
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2


def register() -> None:
    """Makes ``barrier`` of other processes apply to this process; a fork inherits nothing.

    Raises:
        OSError: this host does not support it.
    """
    _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def barrier() -> None:
    """Makes all registered processes and the caller pass a full memory barrier.

    Raises:
        OSError: this host does not support it.
    """
    _membarrier(_GLOBAL_EXPEDITED)


def _membarrier(command: int) -> None:
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(f"membarrier is not known for processors of type {platform.machine()!r}")
    if libc().syscall(number, command, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"membarrier: {os.strerror(code)}")
