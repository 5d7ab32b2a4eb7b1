"""Handles SIGTERM like Ctrl-C, because commands would leave something half done if killed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Makes SIGTERM raise Terminated within its block; for the main thread only."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
