"""Defines notes: remarks on a version that are added after it was published.

A version itself never changes. Each note is a small sealed file beside the versions,
STORE/MODEL/notes/VERSION/NUMBER.json. Files are added and never changed.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from embedserve_store.errors import StoreError
from embedserve_store.format.json_fields import typed
from embedserve_store.format.manifest_checksum import parse_sealed, sealed_json
from embedserve_store.format.version_folder import VERSION_PATTERN

FORMAT_VERSION = 2
"""Format version of note files, the same as that of alias files: both have a seal."""
NOTES_FOLDER = "notes"
_KINDS = {"model": str, "version": int, "number": int, "who": str, "when": str, "text": str}
"""Types of the fields in a file."""
_PATH_PATTERN = re.compile(rf"({VERSION_PATTERN.pattern})/({VERSION_PATTERN.pattern})\.json")


@dataclass(frozen=True)
class Note:
    """A note, with the names and the order of the fields in its file."""

    model: str
    version: int
    number: int
    """Number of the note, from 1 for each version."""
    who: str
    when: str
    """Time of the note: ISO 8601, UTC."""
    text: str

    def to_bytes(self) -> bytes:
        return sealed_json({"format_version": FORMAT_VERSION, **asdict(self)})


def note_path(version: int, number: int) -> str:
    """Returns the path of a note, relative to the folder of the model."""
    return f"{NOTES_FOLDER}/{version}/{number}.json"


def parse_note_path(path: str) -> tuple[int, int] | None:
    """Returns (version, number) of a path below NOTES_FOLDER; None if the path is not that of a
    note.

    >>> parse_note_path("7/2.json"), parse_note_path("7/.new-3")
    ((7, 2), None)
    """
    match = _PATH_PATTERN.fullmatch(path)
    return (int(match[1]), int(match[2])) if match else None


def parse_note(text: bytes, model: str, version: int, number: int, where: str) -> Note:
    """Parses note ``number`` of a version from ``text``.

    Raises:
        StoreError: the file is damaged, or belongs to another model, version or number.
    """
    data = parse_sealed(text, where, FORMAT_VERSION)
    note = Note(**{name: typed(data, name, kind, where) for name, kind in _KINDS.items()})
    if (note.model, note.version, note.number) != (model, version, number):
        raise StoreError(
            f"{where}: is note {note.number} of model {note.model!r} version {note.version}, "
            f"but lies where note {number} of {model!r} version {version} does"
        )
    return note
