"""Fixtures and helpers: a published version, deltas appended to it, and their line."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delta_keys import KeyPair, key_pair
from numpy.typing import NDArray
from writable import writable

from embedserve_store import DeltaLine, DeltaWriter, ModelStore
from embedserve_store.deltas.signing import trusted_keys
from embedserve_store.errors import UnreachableError
from embedserve_store.format.delta_manifest import DeltaManifest

WRITE_S_MAX = 120.0
DIMS = {"user": 16, "item": 8, "tag": 4}


@pytest.fixture
def store(published_store: Path, tmp_path: Path) -> Path:
    """Returns a test's own copy of the store, with version 1 of "m": float32, int8 and int4
    tables."""
    return writable(shutil.copytree(published_store, tmp_path / "store"))


@pytest.fixture
def writer(store: Path) -> Iterator[DeltaWriter]:
    with DeltaWriter(store, model="m") as one:
        yield one


@pytest.fixture
def key_files(tmp_path: Path) -> KeyPair:
    return key_pair(tmp_path)


def rows(table: str, count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, DIMS[table])).astype(np.float32)


def tag_row(row: int, seed: int = 0) -> dict[str, Any]:
    """Returns the changes of a push of one row of "tag"."""
    return {"tag": ([row], rows("tag", 1, seed))}


def push(writer: DeltaWriter, *numbers: int) -> int:
    """Pushes rows of "tag", by default the one after the last seq; returns the seq."""
    chosen = list(numbers) or [writer.seq % 16]
    return writer.push_rows({"tag": (chosen, rows("tag", len(chosen), seed=writer.seq))})


def line_of(store: Path, keys: Path | None = None, *, version: int = 1) -> DeltaLine:
    """Returns the line of a version of "m", whose deltas are read with public keys if given."""
    models = ModelStore(store)
    manifest = models.manifest("m", version)
    return DeltaLine(models, manifest, trusted_keys(keys) if keys else None)


def deltas_in(store: Path) -> list[DeltaManifest]:
    return [delta for delta, _ in line_of(store).deltas()]


def last_of(store: Path) -> DeltaManifest:
    line = line_of(store)
    return line.manifest(line.seqs()[-1])[0]


def ids_of(store: Path, table: str = "user") -> dict[int, int]:
    """Returns the changed ids of the last delta."""
    change = line_of(store).ids(last_of(store))[table]
    return dict(zip(change.ids.tolist(), change.rows.tolist(), strict=True))


def numbers_of(store: Path) -> list[int]:
    """Returns the row numbers of the last delta, whose files have one table each."""
    return [int(n) for (change,) in line_of(store).rows(last_of(store)) for n in change.numbers]


def gate_writes(writer: DeltaWriter) -> threading.Event:
    """Makes the writes of a writer wait for the returned event."""
    gate, real = threading.Event(), writer._line.write

    def write(name: str, data: bytes) -> bool:
        assert gate.wait(WRITE_S_MAX)
        return real(name, data)

    writer._line.write = write
    return gate


@contextmanager
def failing_writes(
    writer: DeltaWriter, ending: str = "", *, is_written: bool = False
) -> Iterator[None]:
    """Makes the writes of files with this ending fail; with ``is_written`` the store has the file,
    and its response is lost."""
    real = writer._line.write

    def write(name: str, data: bytes) -> bool:
        if not name.endswith(ending):
            return real(name, data)
        if is_written:
            assert real(name, data)
        raise UnreachableError("the store is away")

    writer._line.write = write
    try:
        yield
    finally:
        writer._line.write = real
