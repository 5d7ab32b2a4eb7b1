"""Reloads files, such as certificates and tokens, when they change.

Polls modification time, size and inode. An invalid file is logged once, and the previous content
stays in use; a valid file after that is logged, too. Parsing is the caller's.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from embedserve.periodic import repeat

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 1.0
"""Seconds between two polls of the files."""

Signature = tuple[tuple[int, int, int] | None, ...]


class FileReloader(Generic[T]):
    """A value that is read from files, and read again when they change."""

    def __init__(
        self,
        what: str,
        paths: Sequence[str],
        read: Callable[[], T],
        adopt: Callable[[T], None],
    ) -> None:
        """Reads the files and calls ``adopt`` for the first time.

        Args:
            what: name of the value in log messages.
            paths: paths of the files that are polled.
            read: function that reads the value. Runs in a thread, except for the first time. Raises
                OSError or ValueError with the reason.
            adopt: callback for the value, on the event loop's thread.

        Raises:
            OSError: a file cannot be read; the message begins with ``what``.
            ValueError: from ``read``.
        """
        self._what = what
        self._paths = paths
        self._read = read
        self._adopt = adopt
        self._signature = self._sign()
        self._fault = ""
        try:
            adopt(read())
        except OSError as error:
            raise OSError(f"{what}: {error}") from error

    async def poll(self) -> None:
        """Reads the files again if they have changed. Runs in a thread, so that a hanging disk does
        not block the event loop."""
        signature, made, fault = await asyncio.to_thread(self._read_if_changed)
        if signature == self._signature:
            return
        self._signature = signature
        if made is None:
            if fault != self._fault:
                logger.error("%s: %s; what was read before stays in use", self._what, fault)
            self._fault = fault
            return
        self._adopt(made)
        logger.info("%s: read again%s", self._what, ", and right" if self._fault else "")
        self._fault = ""

    def _read_if_changed(self) -> tuple[Signature, T | None, str]:
        """Returns (signature of the files before the read, value, error message). The value is None
        and the message "" if the files have not changed."""
        signature = self._sign()
        if signature == self._signature:
            return signature, None, ""
        try:
            return signature, self._read(), ""
        except (OSError, ValueError) as error:
            return signature, None, str(error)

    def _sign(self) -> Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def poll_all(followed: Sequence[FileReloader[Any]]) -> None:
    """Polls all ``followed`` files every POLL_S, forever."""

    async def poll() -> None:
        for one in followed:
            try:
                await one.poll()
            except Exception:
                logger.exception("files could not be looked at")

    await repeat(POLL_S, poll)
