"""Defines the manifest of a delta: the rows that changed in one push, as frozen values and as JSON.

A line is the sequence of deltas that begins at a published version. It lies beside the versions:

    STORE/MODEL/deltas/7/00000000000000001234.json                     sealed manifest, written last
    STORE/MODEL/deltas/7/00000000000000001234.5f0c….0.0.safetensors    rows that rank 0 wrote

Each manifest has the checksum of the manifest before it, so that a gap or a fork is found. The
first has a checksum of the version's rows. An undo is a delta without files, whose manifest names
the delta that it reverts to. Never reads a file of rows (delta_line.py does). Never imports torch.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.format.delta_goldens import GOLDENS, DeltaGoldens, parse_goldens
from embedserve_store.format.json_fields import typed
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.manifest_checksum import parse_sealed, sealed_json
from embedserve_store.format.signature import SIGNATURE
from embedserve_store.format.text_limit import short_text
from embedserve_store.format.version_folder import to_json_bytes

FORMAT_VERSION = 2
"""Format version of delta manifests, the same as that of notes: both have a seal."""
DELTAS_FOLDER = "deltas"
LINE = "line"
LINE_SEQ = "line_seq"
LINE_CHECKSUM = "line_checksum"
"""Keys in Manifest.source of a compacted version: its LinePosition."""
DELTA_SEQ_MAX = 2**32 - 1
"""Maximum seq of a delta: servers keep the seq in a uint32 (embedserve/deltas/live_rows.py)."""
MANIFEST_BYTES_MAX = 16 << 20
FILES_MAX = 10_000
FILE_BYTES_MAX = 128 << 20
"""Maximum bytes of a file of rows, which is read whole; 128 MiB. Writers begin a new file earlier
(delta_file.py)."""
DELTA_BYTES_MAX = 4 << 30
_MANIFEST_PATTERN = re.compile(r"([0-9]{20})\.json")
_FILE_PATTERN = re.compile(r"([0-9]{20})\.[0-9a-f]{16}\.[0-9]{1,6}\.[0-9]{1,6}\.safetensors")


@dataclass(frozen=True)
class IdCounts:
    """Numbers of changed ids of a table's vocabulary."""

    new: int = 0
    """Ids that have a row from now on: new ones, and those that move to another row."""
    removed: int = 0

    def __add__(self, other: IdCounts) -> IdCounts:
        return IdCounts(self.new + other.new, self.removed + other.removed)


@dataclass(frozen=True)
class DeltaFile:
    """File with rows, or with ids, of one or more tables."""

    name: str
    nbytes: int
    sha256: str
    rows: Mapping[str, int]
    """Number of rows of each table, in the order of the file."""
    ids: Mapping[str, IdCounts] = field(default_factory=dict)
    """Numbers of changed ids of each table, in the order of the file, which then has no rows."""

    def to_json(self) -> dict[str, Any]:
        data = {
            "name": self.name,
            "bytes": self.nbytes,
            "sha256": self.sha256,
            "rows": dict(self.rows),
        }
        if self.ids:
            data["ids"] = {name: [one.new, one.removed] for name, one in self.ids.items()}
        return data


@dataclass(frozen=True)
class DeltaManifest:
    """Content of a delta."""

    model: str
    line: int
    """Version at which the line begins."""
    seq: int
    """Position in the line, from 1 to DELTA_SEQ_MAX."""
    previous: str
    """sha256 of the manifest before; of the first delta, ``base_checksum`` of the version."""
    writer: str
    """User and host of the training job; at most TEXT_MAX characters."""
    token: str
    """Random name of the writer, 16 hexadecimal digits: each training job that starts has a new
    one."""
    step: int | None
    """Training step after which the rows were read, as the writer counts them."""
    as_of: str
    """Time at which the rows were read: ISO 8601 with microseconds, UTC."""
    files: tuple[DeltaFile, ...]
    reverts_to: int | None = None
    """Delta whose state an undo brings back; 0 for the version at which the line begins."""
    why: str = ""
    """Reason of an undo, for people; at most TEXT_MAX characters."""
    goldens: DeltaGoldens | None = None
    """Bags, and the results that they must have after the delta; None if it has none."""
    signature: str = ""
    """Ed25519 signature of the manifest without this field, hexadecimal; "" if it is not signed."""

    @property
    def rows(self) -> dict[str, int]:
        """Returns the number of rows of each table that has some."""
        rows: Counter[str] = Counter()
        for file in self.files:
            rows.update(file.rows)
        return dict(rows)

    @property
    def ids(self) -> dict[str, IdCounts]:
        """Returns the numbers of changed ids of each table that has some."""
        ids: dict[str, IdCounts] = {}
        for file in self.files:
            for table, counts in file.ids.items():
                ids[table] = ids.get(table, IdCounts()) + counts
        return ids

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def to_bytes(self) -> bytes:
        undo = {} if self.reverts_to is None else {"reverts_to": self.reverts_to, "why": self.why}
        goldens = {} if self.goldens is None else {GOLDENS: self.goldens.to_json()}
        signature = {SIGNATURE: self.signature} if self.signature else {}
        return sealed_json(
            {
                "format_version": FORMAT_VERSION,
                "model": self.model,
                "line": self.line,
                "seq": self.seq,
                "previous": self.previous,
                "writer": self.writer,
                "token": self.token,
                "step": self.step,
                "as_of": self.as_of,
                "files": [file.to_json() for file in self.files],
                **undo,
                **goldens,
                **signature,
            }
        )


@dataclass(frozen=True)
class LinePosition:
    """Position in a line: the state of the rows after one of its deltas."""

    line: int
    seq: int
    """Last delta in the rows; 0 for the version at which the line begins."""
    checksum: str
    """Value of ``previous`` in the next delta."""

    def to_source(self) -> dict[str, Any]:
        """Returns the fields that a version compacted up to here adds to Manifest.source."""
        return {LINE: self.line, LINE_SEQ: self.seq, LINE_CHECKSUM: self.checksum}


def base_checksum(manifest: Manifest) -> str:
    """Returns the sha256 that stands for the rows and vocabularies at which a line begins.

    It is the same for a copy of the version in another store.
    """
    tables = {table.name: [table.sha256, table.ids.sha256] for table in manifest.tables}
    return hashlib.sha256(to_json_bytes(tables)).hexdigest()


def position_of(manifest: Manifest) -> LinePosition:
    """Returns the position of a version's rows in its line.

    A version that was not compacted begins a line of its own.

    Raises:
        StoreError: the version's fields of compaction are wrong.
    """
    source = manifest.source
    if LINE not in source:
        return LinePosition(manifest.version, 0, base_checksum(manifest))
    where = f"version {manifest.version} of {manifest.model!r}: source"
    line, seq = typed(source, LINE, int, where), typed(source, LINE_SEQ, int, where)
    if line < 1 or not 1 <= seq <= DELTA_SEQ_MAX:
        raise StoreError(
            f"{where}: {LINE} is {line}, expected 1 or more, and {LINE_SEQ} is {seq}, expected 1 "
            f"to {DELTA_SEQ_MAX}"
        )
    return LinePosition(line, seq, _hex(source, LINE_CHECKSUM, 64, where))


def manifest_name(seq: int) -> str:
    """Returns the file name of a delta's manifest.

    >>> manifest_name(1234)
    '00000000000000001234.json'
    """
    return f"{seq:020d}.json"


def check_seq(seq: int, where: str) -> None:
    """Raises StoreError if ``seq`` is not that of a delta."""
    if not 1 <= seq <= DELTA_SEQ_MAX:
        raise StoreError(f"{where}: seq is {seq}, expected 1 to {DELTA_SEQ_MAX}")


def delta_file_name(seq: int, token: str, rank: int, number: int) -> str:
    """Returns the name of a file of rows or ids.

    ``token`` is drawn for each push and rank, so that a file of a push that failed, or of a writer
    that died, is never taken for another.
    """
    return f"{seq:020d}.{token}.{rank}.{number}.safetensors"


def parse_manifest_name(name: str) -> int | None:
    """Returns the seq of a manifest's file name; None for any other name.

    A seq above DELTA_SEQ_MAX is none.
    """
    match = _MANIFEST_PATTERN.fullmatch(name)
    return int(match[1]) if match and 1 <= int(match[1]) <= DELTA_SEQ_MAX else None


def parse_file_seq(name: str) -> int | None:
    """Returns the seq in the name of a file of rows; None for any other name."""
    match = _FILE_PATTERN.fullmatch(name)
    return int(match[1]) if match else None


def parse_delta(text: bytes, model: str, line: int, seq: int, where: str) -> DeltaManifest:
    """Parses the manifest of delta ``seq`` of a line.

    Raises:
        StoreError: the manifest is damaged, exceeds a limit, or belongs elsewhere.
    """
    if len(text) > MANIFEST_BYTES_MAX:
        raise StoreError(f"{where}: {len(text)} bytes, the limit is {MANIFEST_BYTES_MAX}")
    data = parse_sealed(text, where, FORMAT_VERSION)
    files = typed(data, "files", list, where)
    if len(files) > FILES_MAX:
        raise StoreError(f"{where}: files has {len(files)} entries, the limit is {FILES_MAX}")
    delta = DeltaManifest(
        model=typed(data, "model", str, where),
        line=typed(data, "line", int, where),
        seq=typed(data, "seq", int, where),
        previous=_hex(data, "previous", 64, where),
        writer=short_text(data, "writer", where),
        token=_hex(data, "token", 16, where),
        step=None if data.get("step") is None else typed(data, "step", int, where),
        as_of=_time(data, "as_of", where),
        files=tuple(_file(file, seq, f"{where}: files[{i}]") for i, file in enumerate(files)),
        reverts_to=typed(data, "reverts_to", int, where) if "reverts_to" in data else None,
        why=short_text(data, "why", where) if "reverts_to" in data else "",
        goldens=parse_goldens(data[GOLDENS], where) if GOLDENS in data else None,
        signature=_hex(data, SIGNATURE, 128, where) if SIGNATURE in data else "",
    )
    if (delta.model, delta.line, delta.seq) != (model, line, seq):
        raise StoreError(
            f"{where}: is delta {delta.seq} of line {delta.line} of model {delta.model!r}, "
            f"expected delta {seq} of line {line} of {model!r}"
        )
    if delta.nbytes > DELTA_BYTES_MAX:
        raise StoreError(
            f"{where}: its files have {delta.nbytes} bytes, the limit is {DELTA_BYTES_MAX}"
        )
    if delta.reverts_to is not None:
        _check_undo(delta, where)
    return delta


def check_tables(delta: DeltaManifest, base: Manifest, where: str) -> None:
    """Raises StoreError unless every table of ``delta`` is one of ``base``, with no more rows, ids
    change in vocabularies only, and its goldens fit these tables."""
    tables = {table.name: table for table in base.tables}
    counts = delta.rows
    for name in (*counts, *delta.ids):
        if name not in tables:
            raise StoreError(
                f"{where}: table {name!r} is not one of version {base.version}; tables are "
                f"{', '.join(tables)}"
            )
    for name in delta.ids:
        if tables[name].ids.rule != "map":
            raise StoreError(
                f"{where}: table {name!r}: ids change, but the table has no vocabulary: its ids "
                f"have the rule {tables[name].ids.rule!r}"
            )
    for name, rows in counts.items():
        if rows > tables[name].num_embeddings:
            raise StoreError(
                f"{where}: table {name!r}: {rows} rows, the table has {tables[name].num_embeddings}"
            )
    if delta.goldens is not None:
        delta.goldens.check(base, where)


def _check_undo(delta: DeltaManifest, where: str) -> None:
    assert delta.reverts_to is not None
    if not 0 <= delta.reverts_to < delta.seq - 1:
        raise StoreError(
            f"{where}: reverts_to is {delta.reverts_to}, expected 0 to {delta.seq - 2}"
        )
    if delta.files:
        raise StoreError(f"{where}: reverts to delta {delta.reverts_to}, and has files")
    if delta.goldens is not None:
        raise StoreError(f"{where}: reverts to delta {delta.reverts_to}, and has goldens")


def _file(data: Any, seq: int, where: str) -> DeltaFile:
    if not isinstance(data, dict):
        raise StoreError(f"{where}: expected a JSON object")
    name = typed(data, "name", str, where)
    if parse_file_seq(name) != seq:
        raise StoreError(f"{where}: name is {name!r:.120}, not that of a file of delta {seq}")
    nbytes = typed(data, "bytes", int, where)
    if not 0 < nbytes <= FILE_BYTES_MAX:
        raise StoreError(f"{where}: bytes is {nbytes}, expected 1 to {FILE_BYTES_MAX}")
    rows = typed(data, "rows", dict, where)
    for table in rows:
        if typed(rows, table, int, f"{where}: rows") < 1:
            raise StoreError(f"{where}: rows: {table} is {rows[table]}, expected 1 or more")
    ids = _id_counts(data, where) if "ids" in data else {}
    if rows and ids:
        raise StoreError(f"{where}: has both rows and ids, expected one of them")
    return DeltaFile(name, nbytes, _hex(data, "sha256", 64, where), rows, ids)


def _id_counts(data: dict[str, Any], where: str) -> dict[str, IdCounts]:
    found = typed(data, "ids", dict, where)
    for table, counts in found.items():
        is_pair = isinstance(counts, list) and len(counts) == 2
        if not is_pair or not all(type(one) is int and one >= 0 for one in counts):
            raise StoreError(
                f"{where}: ids: {table} is {counts!r:.80}, expected two counts: new and removed ids"
            )
    return {table: IdCounts(*counts) for table, counts in found.items()}


def _hex(data: dict[str, Any], key: str, count: int, where: str) -> str:
    digits: str = typed(data, key, str, where)
    if not re.fullmatch(rf"[0-9a-f]{{{count}}}", digits):
        raise StoreError(f"{where}: {key} is {digits!r:.80}, expected {count} hexadecimal digits")
    return digits


def _time(data: dict[str, Any], key: str, where: str) -> str:
    time: str = typed(data, key, str, where)
    try:
        parsed = datetime.fromisoformat(time)
        is_utc = parsed.utcoffset() == timedelta(0)
        datetime.fromtimestamp(parsed.timestamp(), UTC)  # rounds the last times of the year 9999 up
    except (ValueError, OverflowError):
        is_utc = False
    if not is_utc:
        raise StoreError(f"{where}: {key} is {time!r:.80}, expected a time in UTC by ISO 8601")
    return time
