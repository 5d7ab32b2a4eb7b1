"""Adds small files beside the versions of a model: whole or not at all, and never changed.

In a folder a file is written aside and linked to its name, which fails for the second of two
writers, who then takes the next number. Never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.remote_store import is_url
from embedserve_store.writing.staging import sync, write_synced

ATTEMPTS = 100
"""Other writers may take a number between our look and our write."""
ASIDE_PREFIX = ".new-"
STALE_S = 3600.0
"""Age after which a file that was written aside is of a writer that was killed."""
TEXT_MAX = 1000
"""Characters of what a person says."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""As file systems say that have no hard links: there the later of two that write at once holds."""


def check_texts(**texts: str) -> None:
    """Raises StoreError for one that is too long."""
    for what, text in texts.items():
        if len(text) > TEXT_MAX:
            raise StoreError(f"{what} has {len(text)} characters, the limit is {TEXT_MAX}")


def user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


Write = Callable[[str, bytes], bool]
"""Writes a new file below the store; False where there is one of its name."""


def writer(store: str) -> Write:
    """Of files behind file:// as of those in a folder: fsspec's may be seen half-written."""
    if not is_url(store):
        return _local_writer(store)
    remote = RemoteFolder(store)
    is_local = store.startswith(("file://", "local://"))
    return _local_writer(remote.root) if is_local else remote.write_new


def _local_writer(store: str) -> Write:
    def write(name: str, data: bytes) -> bool:
        path = Path(store) / name
        try:
            return _write_new(path, data)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror}") from error

    return write


def _write_new(path: Path, data: bytes) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path.parent.parent)
    aside = path.with_name(f"{ASIDE_PREFIX}{secrets.token_hex(8)}")
    try:
        write_synced(aside, data)
        _link(aside, path)
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)
    return True


def _remove_stale(folder: Path) -> None:
    """Removes the files that killed writers left in the folders of ``folder``, all aliases of a
    model or all its notes; a write takes seconds."""
    oldest_s = time.time() - STALE_S
    for aside in folder.glob(f"*/{ASIDE_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone already, or another user's
            if aside.stat().st_mtime < oldest_s:
                aside.unlink()


def _link(aside: Path, path: Path) -> None:
    """Raises FileExistsError where there is a ``path``."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError from error
        os.rename(aside, path)
