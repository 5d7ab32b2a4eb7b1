"""goldens.safetensors: a few inputs of a model and the answers they must get.

Makes the inputs, pools rows by hand as the kernels do, and keeps the answers of the source
model beside those of the rows as stored, so that a server can prove itself before it serves.
Never imports torch: who has the source model computes its answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.layout import dequantize_rows
from embedserve_store.manifest import Manifest, TableSpec
from embedserve_store.tables_file import TablesFile

EXAMPLES = 16
IDS_PER_BAG_MAX = 8
_SEED = 20240229

RowsOf = Callable[[TableSpec, NDArray[np.int64]], NDArray[np.float32]]
"""Gives the float32 rows [n, dim] of a table for ids [n]."""


@dataclass(frozen=True)
class Bags:
    """One KeyedJaggedTensor over the manifest's features: F features, B examples, n ids."""

    ids: NDArray[np.int64]
    """[n], feature by feature, then example by example."""
    lengths: NDArray[np.int32]
    """[F, B]."""
    weights: NDArray[np.float32] | None
    """[n] for a weighted model, else None."""


@dataclass(frozen=True)
class Goldens:
    """Inputs and their answers, float32 [B, sum of dims] in the order of the manifest's keys."""

    bags: Bags
    source_answers: NDArray[np.float32]
    """Of the source model."""
    stored_answers: NDArray[np.float32]
    """Pooled by hand from the rows as stored."""


def sample_bags(manifest: Manifest) -> Bags:
    """The same bags for the same manifest.

    Example 0 asks for the first and the last row of every feature, example 1 for nothing; the
    others have 0 to 8 ids a feature, drawn over all its rows.
    """
    random = np.random.default_rng(_SEED)
    rows = manifest.rows_per_feature
    lengths = random.integers(0, IDS_PER_BAG_MAX + 1, (len(rows), EXAMPLES), dtype=np.int32)
    lengths[:, 0] = 2
    lengths[:, 1] = 0
    ids = [random.integers(0, n, length.sum()) for n, length in zip(rows, lengths, strict=True)]
    for n, feature_ids in zip(rows, ids, strict=True):
        feature_ids[:2] = 0, n - 1
    flat = np.concatenate(ids)
    weights = random.uniform(-1, 2, len(flat)).astype(np.float32) if manifest.is_weighted else None
    return Bags(flat, lengths, weights)


def pool(manifest: Manifest, bags: Bags, rows_of: RowsOf) -> NDArray[np.float32]:
    """The answers to ``bags`` [B, sum of dims], rows added one after another in float32.

    A mean divides by the number of ids, also where they have weights, as FBGEMM does.
    """
    feature_start = np.concatenate(([0], np.cumsum(bags.lengths.sum(axis=1))))
    blocks = []
    for columns in manifest.columns:
        span = slice(feature_start[columns.feature], feature_start[columns.feature + 1])
        rows = rows_of(columns.table, bags.ids[span])
        if bags.weights is not None:
            rows = rows * bags.weights[span, None]
        lengths = bags.lengths[columns.feature]
        blocks.append(_pool_feature(rows, lengths, columns.table.pooling))
    return np.concatenate(blocks, axis=1)


def _pool_feature(
    rows: NDArray[np.float32], lengths: NDArray[np.int32], pooling: str
) -> NDArray[np.float32]:
    bags = np.split(rows, np.cumsum(lengths)[:-1])
    pooled: NDArray[np.float32] = np.stack([bag.sum(axis=0, dtype=np.float32) for bag in bags])
    if pooling == "mean":
        pooled /= np.maximum(lengths, 1).astype(np.float32)[:, None]
    return pooled


def pool_stored(manifest: Manifest, bags: Bags, tables: TablesFile) -> NDArray[np.float32]:
    """The answers [B, sum of dims] from the rows of tables.safetensors; reads those rows only."""

    def rows_of(table: TableSpec, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return dequantize_rows(tables.rows(table.name)[ids], table.dtype, table.embedding_dim)

    return pool(manifest, bags, rows_of)


def save_goldens(goldens: Goldens, path: Path) -> None:
    """Writes ``path``; the caller syncs it.

    Raises:
        OSError: as the file system says.
    """
    from safetensors.numpy import save

    tensors: dict[str, NDArray[np.generic]] = {
        "ids": goldens.bags.ids,
        "lengths": goldens.bags.lengths,
        "source_answers": goldens.source_answers,
        "stored_answers": goldens.stored_answers,
    }
    if goldens.bags.weights is not None:
        tensors["weights"] = goldens.bags.weights
    path.write_bytes(save({name: np.ascontiguousarray(t) for name, t in tensors.items()}))


def load_goldens(path: Path, manifest: Manifest) -> Goldens:
    """Reads ``path`` and checks that it fits the manifest.

    Raises:
        StoreError: missing, damaged, or of other features, rows or dims than the manifest's.
    """
    tensors = _read_tensors(path)
    needed = {"ids", "lengths", "source_answers", "stored_answers"}
    needed |= {"weights"} if manifest.is_weighted else set()
    if tensors.keys() != needed:
        raise StoreError(f"{path}: has {sorted(tensors)}, expected {sorted(needed)}")
    _check_tensors(tensors, manifest, path)
    bags = Bags(tensors["ids"], tensors["lengths"], tensors.get("weights"))
    return Goldens(bags, tensors["source_answers"], tensors["stored_answers"])


def _read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(path.read_bytes())
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise StoreError(f"{path}: not a safetensors file, or truncated: {error}") from error


def _check_tensors(tensors: dict[str, NDArray[Any]], manifest: Manifest, path: Path) -> None:
    ids, lengths = tensors["ids"], tensors["lengths"]
    examples = lengths.shape[-1] if lengths.ndim else 0
    answers_shape = (examples, sum(manifest.length_per_key))
    expected = {
        "ids": ("int64", (ids.size,)),
        "lengths": ("int32", (len(manifest.features), examples)),
        "weights": ("float32", (ids.size,)),
        "source_answers": ("float32", answers_shape),
        "stored_answers": ("float32", answers_shape),
    }
    for name, tensor in tensors.items():
        dtype, shape = expected[name]
        if (tensor.dtype.name, tensor.shape) != (dtype, shape):
            raise StoreError(
                f"{path}: {name} is {tensor.dtype.name} {list(tensor.shape)}, "
                f"the manifest means {dtype} {list(shape)}"
            )
    if lengths.min(initial=0) < 0 or lengths.sum() != ids.size:
        raise StoreError(f"{path}: lengths do not add up to its {ids.size} ids")
    rows = np.repeat(manifest.rows_per_feature, lengths.sum(axis=1))
    outside = np.flatnonzero((ids < 0) | (ids >= rows))
    if len(outside):
        raise StoreError(f"{path}: id {ids[outside[0]]} is outside its table's rows")
