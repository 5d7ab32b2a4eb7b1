"""Defines events: who changed a store, when, from where and how.

Each event is a small sealed file, STORE/.history/MODEL/DAY/TIME-DIGITS.json. Files are added and
never changed. The folder lies outside the models, so that its size costs a reader of versions
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from embedserve_store.errors import StoreError
from embedserve_store.format.json_fields import typed
from embedserve_store.format.manifest_checksum import parse_sealed, sealed_json

FORMAT_VERSION = 2
"""Format version of events, the same as that of notes: both have a seal."""
HISTORY_FOLDER = ".history"
DAY_PATTERN = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
FILE_PATTERN = re.compile(r"[0-9]{8}T[0-9]{12}Z-[0-9a-f]{8}\.json")
"""Name of an event: its time to the microsecond, and digits that tell simultaneous ones apart."""


@dataclass(frozen=True)
class Event:
    """A change of a store, with the names and the order of the fields in its file."""

    what: str
    """Kind of the change: publish, alias, note, copy, compact, undo, prune,
    delete."""
    model: str
    versions: Sequence[int]
    """Versions that the change concerns, ascending."""
    who: str
    when: str
    """Time of the change: ISO 8601, UTC."""
    host: str
    """Host on which the change was made."""
    source: str
    """Checkpoint that was published, or store that was copied from; else empty."""
    detail: str
    """Name of the alias, text of the note, or deltas that were copied; else empty."""

    def to_bytes(self) -> bytes:
        return sealed_json({"format_version": FORMAT_VERSION, **asdict(self)})


def parse_event(text: bytes, where: str) -> Event:
    """Parses the event in ``text``.

    Raises:
        StoreError: the file is damaged.
    """
    data = parse_sealed(text, where, FORMAT_VERSION)
    versions = typed(data, "versions", list, where)
    if not all(type(one) is int for one in versions):
        raise StoreError(f"{where}: versions is {versions!r}, expected a list of numbers")
    texts = {
        name: typed(data, name, str, where)
        for name in ("what", "model", "who", "when", "host", "source", "detail")
    }
    return Event(versions=versions, **texts)
