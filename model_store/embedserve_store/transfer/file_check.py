"""Compares the bytes of a version's files with the checksums in its manifest, as they pass.

A file is checked from its first byte to its last. So a copy reads each byte once. Never imports
torch.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from embedserve_store.format.manifest import CHECKED_FILES, Manifest
from embedserve_store.format.manifest_checksum import changed
from embedserve_store.format.safetensors_file import encode_header
from embedserve_store.format.tables_file import file_order, header_bytes
from embedserve_store.ids.id_map import tensors_of

MANIFEST = "manifest.json"
TABLES = "tables.safetensors"
IDS = "ids.safetensors"
HEADER = ""
"""Name of the spans that belong to no table: a header, or a whole file."""


@dataclass(frozen=True)
class FileLayout:
    """Checksums of a file of a version, and the bytes that each of them covers."""

    spans: tuple[tuple[str, int], ...]
    """Table and number of bytes of each span, in the order of the file. A table may have several.
    Empty: one checksum covers the file, whatever its size."""
    sha256: Mapping[str, str]
    """Hexadecimal sha256 of each table's spans, in the order of the file."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.spans)


def file_layouts(manifest: Manifest) -> dict[str, FileLayout]:
    """Returns the layouts of a version's files by name, without manifest.json."""
    layouts = {name: FileLayout((), {HEADER: manifest.files[name]}) for name in CHECKED_FILES}
    mapped = [table for table in manifest.tables if table.ids.rule == "map"]
    if mapped:
        tensors = tensors_of({table.name: table.ids.entries for table in mapped})
        parts = []
        for name, tensor in tensors.items():
            start, end = tensor["data_offsets"]
            parts.append((name.rpartition(".")[0], end - start))
        checksums = {table.name: table.ids.sha256 for table in mapped}
        layouts[IDS] = _with_header(encode_header(tensors), parts, checksums)
    rows = [(table.name, table.nbytes) for table in file_order(manifest.tables)]
    checksums = {table.name: table.sha256 for table in manifest.tables}
    layouts[TABLES] = _with_header(header_bytes(manifest.tables), rows, checksums)
    return layouts


def _with_header(
    header: bytes, spans: list[tuple[str, int]], checksums: Mapping[str, str]
) -> FileLayout:
    header_sha256 = hashlib.sha256(header).hexdigest()
    return FileLayout(((HEADER, len(header)), *spans), {HEADER: header_sha256, **checksums})


class FileCheck:
    """Checks one file. Receives its bytes in order, no more than the layout has; ``problem``
    compares the checksums."""

    def __init__(self, layout: FileLayout, where: str) -> None:
        self._layout = layout
        self._where = where
        self._digests = {name: hashlib.sha256() for name in layout.sha256}
        self._spans = iter(layout.spans)
        self._name, self._left = next(self._spans, (HEADER, sys.maxsize))

    def update(self, data: bytes | memoryview) -> None:
        """Adds the next bytes of the file."""
        rest = memoryview(data)
        while rest:
            while not self._left:
                self._name, self._left = next(self._spans)
            count = min(self._left, len(rest))
            self._digests[self._name].update(rest[:count])
            self._left -= count
            rest = rest[count:]

    def problem(self) -> str | None:
        """Returns what differs from the published file, by table; None if nothing does."""
        for name, digest in self._digests.items():
            found, expected = digest.hexdigest(), self._layout.sha256[name]
            if found != expected:
                if name == HEADER and self._layout.spans:
                    return f"{self._where}: its header is not as it was published"
                where = self._where if name == HEADER else f"{self._where}: table {name!r}"
                return changed(found, expected, where)
        return None
