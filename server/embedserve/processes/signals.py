"""Signals of the supervisor, which waits in a select."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Callable, Iterator

WAKEUP_BYTES = 4096
"""Bytes of pending wake-ups that are read at once; each signal writes one."""


@contextlib.contextmanager
def wake_on_signals(
    selector: selectors.BaseSelector, stop: Callable[[], None], reload: Callable[[], None]
) -> Iterator[None]:
    """Calls ``stop`` for SIGTERM and SIGINT, and ``reload`` for SIGHUP, within its block. Each of
    these signals and SIGCHLD also wakes the select.

    Signal handlers run between any two instructions, so ``stop`` and ``reload`` only set flags.
    """
    ours, wakeup = socket.socketpair()
    ours.setblocking(False)
    wakeup.setblocking(False)
    selector.register(ours, selectors.EVENT_READ, lambda _: ours.recv(WAKEUP_BYTES))
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: stop()),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: stop()),
        signal.SIGHUP: signal.signal(signal.SIGHUP, lambda *_: reload()),
        signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None),
    }
    before_fd = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        wakeup.close()
