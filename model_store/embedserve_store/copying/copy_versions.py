"""Copies versions from one store to another, with the deltas, notes and aliases beside them.

The target has a whole version or none at any moment: in a folder the files are written to a hidden
folder, which is renamed; behind a URL the manifest comes last. The newest version arrives first,
and so does the last change of each alias, because servers may follow the target or wait for it. A
copy that was interrupted is started again, and uses what has arrived if its checksums are right.
Never imports torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embedserve_store.copying.copy_deltas import copy_deltas
from embedserve_store.errors import MissingFileError, StoreError, failed_write
from embedserve_store.format import alias, note
from embedserve_store.format.manifest import Manifest, parse_manifest
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.added_file import writer
from embedserve_store.publishing.record_event import record_event
from embedserve_store.remote.pull import place
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.upload import send
from embedserve_store.transfer.file_check import MANIFEST
from embedserve_store.transfer.receive import TransferProgress
from embedserve_store.transfer.stored_version import StoredVersion
from embedserve_store.writing.staging import check_room, check_writable, copy_folder

CONTENT_DIGITS = 12
"""Hexadecimal digits of the manifest's sha256 in the name of an unfinished copy."""


@dataclass(frozen=True)
class CopiedModel:
    """Result of a copy.

    Attributes:
        copied, present: versions that were copied, and that the target had already, ascending.
        aliases: aliases whose changes were copied.
        left_out: aliases that name a version that the target does not have.
        notes: number of notes that were copied.
        deltas: number of deltas that were copied.
    """

    model: str
    copied: Sequence[int]
    present: Sequence[int]
    aliases: Sequence[str] = ()
    left_out: Sequence[str] = ()
    notes: int = 0
    deltas: int = 0


def copy_versions(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    model: str,
    version: int | str | None = None,
    *,
    aliases: bool = False,
    deltas: bool = True,
    who: str | None = None,
    progress: TransferProgress | None = None,
) -> CopiedModel:
    """Copies versions of ``model``, under their numbers, with their notes and deltas.

    Each byte is compared with the checksums of the manifest while it is copied. A version that the
    target has already is left alone. The newest version is copied first, then the others,
    ascending. One that another process removes meanwhile is left out. If the copy was interrupted,
    call it again.

    Args:
        source: a folder or a URL. Its versions stay.
        target: a folder, created if missing, or a URL.
        version: a version number, or an alias of the source. Default: all versions.
        aliases: whether aliases are copied, too, with their history. Aliases that name a version
            that the target does not have are left out.
        deltas: whether the deltas after the versions are copied, too; see copy_deltas.
        who: author recorded in the history of the target. Default: USER@HOST.

    Raises:
        StoreError: a version does not exist or is damaged, or the target has another version, note
            or change of an alias under the same number, or another delta of the same seq. Also
            raised if a store cannot be read or written.
    """
    read, write = ModelStore(source), ModelStore(target)
    # Aliases are read before the versions are copied, which may take hours: later changes may name
    # other versions. An alias is set after its version was published, so no version is missing.
    names = sorted(read.alias_changes(model)) if aliases else []
    histories = {name: read.alias_history(model, name) for name in names}
    numbers = read.versions(model) if version is None else [read.resolve(model, version)]
    if not numbers:
        raise StoreError(f"{read.where}/{model}: no version is published")
    by_number, copied = _copy_all(read, write, model, numbers, who, progress)
    numbers = sorted(by_number)
    notes = [f"{one}/{n}.json" for one in numbers for n in read.note_numbers(model, one)]
    now = {name: history[0].version for name, history in histories.items()}
    named = {one for one in now.values() if one is not None}
    there = {one for one in named if one in numbers or _found(write, model, one)}
    left_out = [name for name, one in now.items() if one is not None and one not in there]
    kept = [name for name in now if name not in left_out]
    changes = {name: [one.change_number for one in histories[name]] for name in kept}
    _copy_beside(read, write, model, alias.ALIASES_FOLDER, _last_first(changes))
    note_count = _copy_beside(read, write, model, note.NOTES_FOLDER, notes)
    # A damaged delta prevents the copy of nothing but the deltas after it.
    delta_count = copy_deltas(read, write, by_number.values(), who=who) if deltas else 0
    return CopiedModel(
        model,
        sorted(copied),
        [one for one in numbers if one not in copied],
        kept,
        left_out,
        note_count,
        delta_count,
    )


def _copy_all(
    source: ModelStore,
    target: ModelStore,
    model: str,
    numbers: Sequence[int],
    who: str | None,
    progress: TransferProgress | None,
) -> tuple[dict[int, Manifest], list[int]]:
    """Copies versions, the last one first. Leaves out those that are removed meanwhile.

    Returns:
        The manifests of the versions that the target has, by number, and the numbers of those that
        were copied.
    """
    copied: list[int] = []
    manifests: dict[int, Manifest] = {}
    for one in (numbers[-1], *numbers[:-1]):
        try:
            stored = source.stored(model, one)
            is_new = _copy_version(stored, target, progress)
        except StoreError:
            if one == numbers[-1] or one in source.versions(model):
                raise
            continue
        manifests[one] = stored.manifest
        if is_new:
            origin = f"{source.where}/{model}"
            record_event(target.where, "copy", model, (one,), who=who, source=origin)
            copied.append(one)
    return manifests, copied


def _copy_version(
    version: StoredVersion, target: ModelStore, progress: TransferProgress | None
) -> bool:
    """Copies a version. Returns False if the target has it already."""
    if _is_there(version, target):
        return False
    if target.is_remote:
        send(version, RemoteFolder(target.where), None, progress)
        return True
    folder = Path(target.where) / version.path
    try:
        check_writable(folder.parent)
        # Another version under this number has another name.
        content = hashlib.sha256(version.manifest_json).hexdigest()[:CONTENT_DIGITS]
        with copy_folder(folder.parent, f"{version.number}-{content}") as staging:
            arrived = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
            check_room(folder.parent, version.nbytes - arrived)
            if place(version, staging, folder, progress):
                return True
    except OSError as error:
        raise failed_write(f"{folder}: copying failed", error) from error
    if not _is_there(version, target):
        raise StoreError(f"{folder}: exists, but has no {MANIFEST}")
    return False


def _is_there(version: StoredVersion, target: ModelStore) -> bool:
    """Returns whether the target has the version.

    Raises:
        StoreError: the target has another version under this number.
    """
    found = _found(target, version.model, version.number)
    if found is None:
        return False
    if found == version.manifest_json:
        return True
    where = f"{target.where}/{version.path}"
    manifest = parse_manifest(found, f"{where}/{MANIFEST}")
    raise StoreError(
        f"{where}: is another version than {version.where}: published {_published_at(manifest)}, "
        f"not {_published_at(version.manifest)}; versions never change"
    )


def _found(target: ModelStore, model: str, number: int) -> bytes | None:
    """Returns the manifest of a version in the target; None if the target does not have it.

    Lists nothing, because some S3 servers read every object that they list (remote_files.py).
    """
    try:
        return target.read(f"{model}/{number}/{MANIFEST}")
    except MissingFileError:
        return None


def _published_at(manifest: Manifest) -> str:
    return str(manifest.source.get("published_at", "at an unknown time"))


def _last_first(changes: Mapping[str, Sequence[int]]) -> list[str]:
    """Returns the paths of the changes of aliases: first the one of each alias that applies.

    Readers apply the change with the highest number (alias.py). So in the target an alias goes from
    its former state to its last one, and the earlier changes only fill its history.
    """
    last = [f"{name}/{max(numbers)}.json" for name, numbers in changes.items()]
    earlier = [f"{name}/{n}.json" for name, numbers in changes.items() for n in sorted(numbers)]
    return list(dict.fromkeys(last + earlier))


def _copy_beside(
    source: ModelStore, target: ModelStore, model: str, what: str, paths: Iterable[str]
) -> int:
    """Copies small files beside the versions, in the order of ``paths``.

    Returns how many the target did not have.

    Raises:
        StoreError: the target has another file of that name. No file is copied then.
    """
    folder = f"{model}/{what}"
    there = {f"{folder}/{path}" for path in target.files_beside(model, what)}
    missing = []
    for path in (f"{folder}/{path}" for path in paths):
        data = source.read(path)
        if path not in there:
            missing.append((path, data))
        elif target.read(path) != data:
            raise StoreError(
                f"{target.where}/{path}: is another than that of {source.where}: "
                "it was added in both stores"
            )
    write = writer(target.where, folder)
    return sum(write(path, data) for path, data in missing)
