"""Reloads files, such as certificates and tokens, when they change.

Polls the times of modification and status change, size and inode. An invalid or unreadable file is
logged once and read again every RETRY_S, and the previous content stays in use; a valid file after
that is logged, too. Parsing is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from embedserve.daemon_threads import run_in_daemon_thread
from embedserve.periodic import repeat

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 1.0
"""Seconds between two polls of the files."""
RETRY_S = 10.0
"""Seconds after which unchanged files are read again if their last read failed. A lack of
descriptors ends, and a certificate becomes valid, without a change of the files. Not each POLL_S,
as 10,000 tokens take a quarter of a second."""

Signature = tuple[tuple[int, int, int, int] | None, ...]


@contextlib.contextmanager
def named_in_errors(what: str) -> Iterator[None]:
    """Puts ``what``, a setting, before the message of an error, which names a file alone."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{what}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


class FileReloader(Generic[T]):
    """A value that is read from files, and read again when they change or could not be read."""

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
            OSError, ValueError: from ``read``; the message begins with ``what``.
        """
        self._what = what
        self._paths = paths
        self._read = read
        self._adopt = adopt
        self._signature = self._sign()
        self._fault = ""
        self._retry_at_s = math.inf
        with named_in_errors(what):
            adopt(read())

    async def poll(self) -> None:
        """Reads the files again if they have changed, or RETRY_S after a read that failed. Runs in
        a daemon thread, so that a hanging disk blocks neither the event loop nor the end of the
        process."""
        if (found := await run_in_daemon_thread("reload", self._read_if_due)) is None:
            return
        self._signature, made, fault = found
        self._retry_at_s = time.monotonic() + RETRY_S
        if made is None:
            if fault != self._fault:
                logger.error("%s: %s; what was read before stays in use", self._what, fault)
            self._fault = fault
            return
        self._adopt(made)
        self._retry_at_s = math.inf
        logger.info("%s: read again%s", self._what, ", and right" if self._fault else "")
        self._fault = ""

    def _read_if_due(self) -> tuple[Signature, T | None, str] | None:
        """Returns (signature of the files before the read, value, error message), with the value
        None or the message ""; None if no read is due."""
        signature = self._sign()
        if signature == self._signature and time.monotonic() < self._retry_at_s:
            return None
        try:
            return signature, self._read(), ""
        except (OSError, ValueError) as error:
            return signature, None, str(error)

    def _sign(self) -> Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # A chmod or chown that makes a file readable changes only the time of its status.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


async def poll_all(followed: Sequence[FileReloader[Any]]) -> None:
    """Polls each of ``followed`` every POLL_S, forever. A file that hangs holds up no other."""
    await asyncio.gather(*(repeat(POLL_S, partial(_poll, one)) for one in followed))


async def _poll(reloader: FileReloader[Any]) -> None:
    try:
        await reloader.poll()
    except Exception:
        logger.exception("files could not be looked at")
