"""Adds small files beside the versions of a model, such as alias changes, notes and deltas.

A file appears whole or not at all, and never changes. In a folder, the file is written under a
temporary name and then hard-linked to its final name. The link fails for the second of two writers,
which then takes the next number. Never imports torch.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from embedserve_store.errors import UnreachableError
from embedserve_store.remote.remote_files import LOCAL, RemoteFolder
from embedserve_store.remote.remote_store import is_url
from embedserve_store.writing.small_files import ASIDE_PREFIX, NO_LINKS, write_new, write_synced

ATTEMPTS = 100
"""Attempts to write the next number, which another writer may take after the listing."""
STALE_S = 3600.0
"""Seconds after which a temporary file is removed as left behind by a killed writer. A write takes
seconds; one hour leaves a wide margin."""


def user() -> str:
    """Returns the author of a change: EMBEDSERVE_BY, or else USER@HOST."""
    if by := os.environ.get("EMBEDSERVE_BY"):
        return by
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def now() -> str:
    """Returns the time of a change, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


Write = Callable[[str, bytes], bool]
"""Writes a new file below the store. Returns False if a file of that name exists."""


def writer(store: str, folder: str) -> Write:
    """Returns the function that writes new files into subfolders of ``folder`` of ``store``.

    Removes what killed writers left in these subfolders. file:// URLs use the local writer, because
    a file that fsspec writes there can be seen half-written.
    """
    where = _folder_or_remote(store)
    if isinstance(where, RemoteFolder):
        return where.write_new
    _remove_stale(Path(where) / folder)
    return _local_writer(where, Path(where) / folder.split("/")[0])


def is_exclusive(store: str, folder: str) -> bool:
    """Returns whether only the first of two writers can create a file in ``folder``.

    Raises:
        UnreachableError: the store cannot be written.
    """
    probe = f"{folder}/{ASIDE_PREFIX}{secrets.token_hex(8)}"
    where = _folder_or_remote(store)
    if isinstance(where, RemoteFolder):
        return where.refuses_second(probe)
    return _has_links(Path(where) / probe)


def _folder_or_remote(store: str) -> str | RemoteFolder:
    if not is_url(store):
        return store
    remote = RemoteFolder(store)
    return remote.root if store.startswith(LOCAL) else remote


def _has_links(probe: Path) -> bool:
    """Returns whether the file system of the new file ``probe`` has hard links."""
    linked = probe.with_name(f"{probe.name}-2")
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(probe, b"")
            os.link(probe, linked)
        finally:
            linked.unlink(missing_ok=True)
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise UnreachableError(f"{probe}: cannot be written: {error.strerror}") from error
        return False
    return True


def _local_writer(store: str, model: Path) -> Write:
    was_there = model.is_dir()

    def write(name: str, data: bytes) -> bool:
        path = Path(store) / name
        try:
            if was_there:
                model.stat()  # else the store is gone, for example not mounted any more
            return write_new(path, data)
        except OSError as error:
            raise UnreachableError(f"{path}: cannot be written: {error.strerror}") from error

    return write


def _remove_stale(folder: Path) -> None:
    """Removes temporary files of killed writers from the subfolders of ``folder``.

    ``folder`` holds all aliases, notes or deltas of a model. Only files older than STALE_S are
    removed.
    """
    oldest_s = time.time() - STALE_S
    # Path.glob would raise an error for a folder that may not be searched.
    for name in glob.iglob(f"*/{ASIDE_PREFIX}*", root_dir=folder):
        with contextlib.suppress(OSError):  # already gone, or owned by another user
            if (aside := folder / name).stat().st_mtime < oldest_s:
                aside.unlink()
