"""Files whose content is taken anew when they change: certificates, tokens.

What is wrong with them is said once, and that it is mended; until then what was read before goes
on. Only the looks are here: what the files hold, others read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_S = 1.0
"""Between two looks at the files."""

Signature = tuple[tuple[int, int, int] | None, ...]


class FileReloader(Generic[T]):
    """Something that is read from files."""

    def __init__(
        self,
        what: str,
        paths: Sequence[str],
        read: Callable[[], T],
        adopt: Callable[[T], None],
    ) -> None:
        """Reads it for the first time.

        Args:
            what: it is, for the log.
            read: in a thread but for the first time. OSError and ValueError say what is wrong.
            adopt: called on the event loop's thread with what was read.

        Raises:
            OSError, ValueError: as ``read``.
        """
        self._what = what
        self._paths = paths
        self._read = read
        self._adopt = adopt
        self._signature = self._sign()
        self._fault = ""
        adopt(read())

    async def poll(self) -> None:
        """Takes the files again if they are others. A disk that hangs keeps nobody else waiting."""
        signature, made, fault = await asyncio.to_thread(self._read_if_changed)
        if signature == self._signature:
            return
        self._signature = signature
        if made is None:
            if fault != self._fault:
                logger.error("%s: %s; what was read before goes on", self._what, fault)
            self._fault = fault
            return
        self._adopt(made)
        logger.info("%s: read again%s", self._what, ", and right" if self._fault else "")
        self._fault = ""

    def _read_if_changed(self) -> tuple[Signature, T | None, str]:
        """(of the files as they were before they were read, what was read, what is wrong)"""
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
    """Looks at them now and then, for ever."""
    while True:
        await asyncio.sleep(LOOK_S)
        for one in followed:
            try:
                await one.poll()
            except Exception:
                logger.exception("files could not be looked at")
