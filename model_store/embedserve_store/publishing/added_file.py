"""Adds small files beside the versions of a model, such as alias changes and notes.

A file appears whole or not at all, and never changes. In a folder, the file is written under a
temporary name and then hard-linked to its final name. The link fails for the second of two writers,
which then takes the next number. Never imports torch.
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
"""Attempts to write the next number, which another writer may take after the listing."""
ASIDE_PREFIX = ".new-"
STALE_S = 3600.0
"""Seconds after which a temporary file is removed as left behind by a killed writer. A write takes
seconds; one hour leaves a wide margin."""
TEXT_MAX = 1000
"""Maximum length in characters of a text that a person enters: a note, a reason or an author."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Errors of ``link`` on file systems without hard links. There the file is renamed, and the later
of two concurrent writers wins."""


def check_texts(**texts: str) -> None:
    """Raises StoreError for a text that is longer than TEXT_MAX."""
    for what, text in texts.items():
        if len(text) > TEXT_MAX:
            raise StoreError(f"{what} has {len(text)} characters, the limit is {TEXT_MAX}")


def user() -> str:
    """Returns the author of a change: EMBEDSERVE_BY, or else USER@HOST."""
    if by := os.environ.get("EMBEDSERVE_BY"):
        return by
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


Write = Callable[[str, bytes], bool]
"""Writes a new file below the store. Returns False if a file of that name exists."""


def writer(store: str) -> Write:
    """Returns the function that writes new files into ``store``.

    file:// URLs use the local writer, because a file that fsspec writes there can be seen
    half-written.
    """
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
    """Removes temporary files of killed writers from the subfolders of ``folder``.

    ``folder`` holds all aliases or all notes of a model. Only files older than STALE_S are removed.
    """
    oldest_s = time.time() - STALE_S
    for aside in folder.glob(f"*/{ASIDE_PREFIX}*"):
        with contextlib.suppress(OSError):  # already gone, or owned by another user
            if aside.stat().st_mtime < oldest_s:
                aside.unlink()


def _link(aside: Path, path: Path) -> None:
    """Links ``aside`` to ``path``, or renames it where the file system has no hard links.

    Raises:
        FileExistsError: ``path`` exists.
    """
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError from error
        os.rename(aside, path)
