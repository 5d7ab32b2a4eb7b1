"""Fixtures: a published version to which deltas are appended."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from delta_keys import KeyPair, key_pair
from numpy.typing import NDArray
from writable import writable

from embedserve_store import DeltaWriter

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
