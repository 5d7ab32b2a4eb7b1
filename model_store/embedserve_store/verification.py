"""Verifies every byte of an opened version against the checksums in its manifest.

Never imports torch, never writes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from embedserve_store.errors import StoreError, reading
from embedserve_store.format.manifest import parse_manifest
from embedserve_store.format.manifest_checksum import check_sha256
from embedserve_store.format.safetensors_file import encode_header
from embedserve_store.format.tables_file import Progress, header_bytes
from embedserve_store.ids.id_map import check_id_maps, tensors_of
from embedserve_store.model_version import ModelVersion
from embedserve_store.transfer.file_check import IDS, MANIFEST
from embedserve_store.transfer.stored_version import check_small_files, read_file


def verify(version: ModelVersion, progress: Progress | None = None) -> None:
    """Reads every byte of ``version`` and compares it with the checksums in its manifest.

    Of a part only its rows are read, and without rows only the other files. In format version 1 the
    manifest itself has no checksum.

    Raises:
        StoreError: a file or table has changed since it was published.
    """
    manifest_path, ids_path = version.path / MANIFEST, version.path / IDS
    manifest = parse_manifest(read_file(manifest_path), str(manifest_path))
    if manifest.fingerprint != version.whole.fingerprint:
        raise StoreError(f"{manifest_path}: is another manifest than the one that was opened")
    check_small_files(version.path, version.manifest)
    if version.id_maps:
        entries = {name: len(one) for name, one in version.id_maps.items()}
        _check_header(ids_path, encode_header(tensors_of(entries)))
        check_id_maps(version.id_maps, version.manifest.tables, ids_path)
    tables = version.tables
    if tables.tables:
        _check_header(tables.path, header_bytes(version.whole.tables))
    bytes_done = 0
    for name in tables.offsets:
        table, digest, rows_done = tables.tables[name], hashlib.sha256(), 0
        for block in tables.blocks(name):
            digest.update(block.data)
            rows_done, bytes_done = rows_done + len(block), bytes_done + block.nbytes
            if progress:
                progress(name, rows_done, table.num_embeddings, bytes_done)
        check_sha256(digest.hexdigest(), table.sha256, f"{tables.path}: table {name!r}")


def _check_header(path: Path, expected: bytes) -> None:
    """Raises StoreError unless ``path`` begins with ``expected``, header length and header.

    A header follows from the manifest, so it needs no checksum. Opening has compared the parsed
    header; this compares its bytes, including the padding.
    """
    with reading(path), path.open("rb") as file:
        found = file.read(len(expected))
    if found != expected:
        raise StoreError(f"{path}: its header is not as it was published")
