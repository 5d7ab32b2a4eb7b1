"""Moves an alias of a model to another version, or removes it. Never imports torch.

A change appears whole or not at all: in a folder a file is written aside and linked to its name,
which fails for the second of two writers, who then takes the next number.
"""

from __future__ import annotations

import errno
import getpass
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.format.alias import TEXT_MAX, Alias, check_name, file_name
from embedserve_store.model_store import ModelStore
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.remote_store import is_url
from embedserve_store.writing.staging import sync, write_synced

ATTEMPTS = 100
"""Other writers may take a number between our look and our write."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""As file systems say that have no hard links: there the later of two that write at once holds."""


def set_alias(
    store: str | os.PathLike[str],
    model: str,
    name: str,
    version: int | str | None,
    *,
    why: str = "",
    who: str | None = None,
    share: float = 0.0,
    shadow: float = 0.0,
) -> Alias:
    """Has the alias ``name`` of ``model`` mean ``version`` from now on; returns the change.

    Args:
        store: a folder or a URL.
        version: a number, or another alias for what it means now; None removes the alias.
        why, who: kept with the change; who is USER@HOST unless told.
        share: of the requests that name the model and no version, in percent: what servers that
            follow the alias answer with it, where another version answers the rest.
        shadow: of that other version's batches, in percent: what they look up in this one, too, and
            compare.

    Raises:
        StoreError: the name cannot be an alias, there is no such version or no alias to remove,
            ``share`` or ``shadow`` is no percentage, or the store cannot be read or written.
    """
    check_name(name)
    for field, percent in (("share", share), ("shadow", shadow)):
        if not 0.0 <= percent <= 100.0:
            raise StoreError(f"{field} is {percent:g}, expected a percentage from 0 to 100")
    who = _user() if who is None else who
    for what, text in (("why", why), ("who", who)):
        if len(text) > TEXT_MAX:
            raise StoreError(f"{what} has {len(text)} characters, the limit is {TEXT_MAX}")
    models = ModelStore(store)
    number = None if version is None else models.manifest(model, version).version
    if number is None and name not in models.aliases(model):
        raise StoreError(f"{models.where}/{model}: no alias {name!r} to remove")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    change = Alias(model, name, 0, number, who, when, why, float(share), float(shadow))
    write = _writer(models.where)
    for _ in range(ATTEMPTS):
        numbers = models.alias_changes(model).get(name, [0])
        change = replace(change, number=max(numbers) + 1)
        if write(f"{model}/{file_name(name, change.number)}", change.to_bytes()):
            _check_there(models, change)
            return change
    raise StoreError(f"{models.where}/{model}: others changed alias {name!r} {ATTEMPTS} times")


def _check_there(models: ModelStore, change: Alias) -> None:
    """Who removes versions may not have seen the change yet."""
    if change.version is not None and change.version not in models.versions(change.model):
        raise StoreError(
            f"{models.where}/{change.model}: version {change.version} was removed meanwhile, and "
            f"alias {change.name!r} names it: set it to another"
        )


def _user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


Write = Callable[[str, bytes], bool]
"""Writes a new file below the store; False where there is one of its name."""


def _writer(store: str) -> Write:
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
    aside = path.with_name(f".new-{secrets.token_hex(8)}")
    try:
        write_synced(aside, data)
        _link(aside, path)
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)
    return True


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
