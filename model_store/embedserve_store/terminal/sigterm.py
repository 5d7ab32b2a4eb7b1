"""SIGTERM as Ctrl-C, for commands that leave something half done when they are killed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within, SIGTERM raises KeyboardInterrupt; for the main thread only."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
