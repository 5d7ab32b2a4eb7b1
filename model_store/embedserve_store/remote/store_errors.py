"""Converts the errors of fsspec's file systems to StoreError, and logs long waits for a store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from embedserve_store.errors import MissingFileError, UnreachableError

logger = logging.getLogger(__name__)

WAIT_LOG_S = 10.0
"""Seconds after which a wait for the store is logged, and again after each doubling."""


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Converts errors of any file system to StoreError, with ``where`` at the start of the message.

    It catches Exception, because the libraries under fsspec share no base class. The errors of
    botocore and aiohttp are unrelated, and not all of them are OSErrors.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"{where}: does not exist") from error
    except Exception as error:
        raise UnreachableError(f"{where}: the remote store says: {one_line(error)}") from error


@contextmanager
def logged_waits(where: str) -> Iterator[None]:
    """Logs a wait for ``where`` after WAIT_LOG_S, and again after each doubling."""
    is_done = threading.Event()

    def log() -> None:
        waited_s = 0.0
        wait_s = WAIT_LOG_S
        while not is_done.wait(wait_s):
            waited_s += wait_s
            wait_s = waited_s
            logger.warning("%s: the remote store has not answered for %g s", where, waited_s)

    thread = threading.Thread(target=log, name="store-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()


def one_line(error: Exception) -> str:
    """Returns the message of ``error`` on one line; its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
