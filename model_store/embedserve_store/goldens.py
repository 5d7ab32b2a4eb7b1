"""goldens.safetensors: a few inputs of a model and the answers they must get.

Makes the inputs, with ids as callers have them, pools rows by hand as the kernels do, and keeps
the answers of the source model beside those of the rows as stored. parity.py compares them with
a server's. Never imports torch: who has the source model computes its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.ids.id_map import IdMap
from embedserve_store.ids.rules import IdRule
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.layout import dequantize_rows
from embedserve_store.manifest import Manifest
from embedserve_store.table_spec import TableSpec
from embedserve_store.tables_file import TablesFile

EXAMPLES = 16
IDS_PER_BAG_MAX = 8
_SEED = 20240229

MULTIPLES_MAX = 1 << 20
"""Of its modulus that a sampled id of the hash trick is away from its row, either way."""

RowsOf = Callable[[TableSpec, NDArray[np.int64]], NDArray[np.float32]]
"""Gives the float32 rows [n, dim] of a table for row numbers [n]."""


@dataclass(frozen=True)
class Bags:
    """One KeyedJaggedTensor over the manifest's features: F features, B examples, n ids."""

    ids: NDArray[np.int64]
    """[n], feature by feature, then example by example; as callers send them (string ids as their
    hash), none of them unknown."""
    lengths: NDArray[np.int32]
    """[F, B]."""
    weights: NDArray[np.float32] | None
    """[n] for a weighted model, else None."""


@dataclass(frozen=True)
class Goldens:
    """Inputs and their answers: float32 [B, sum of dims] in the order of the manifest's keys.

    Of an unpooled model: [N, dim], for each key one row for each id of its feature.
    """

    bags: Bags
    source_answers: NDArray[np.float32]
    """Of the source model."""
    stored_answers: NDArray[np.float32]
    """Pooled by hand from the rows as stored."""


def sample_bags(manifest: Manifest, id_maps: Mapping[str, IdMap]) -> Bags:
    """The same bags for the same manifest and maps (by table).

    Example 0 asks for two ids of every feature, where rows are plain the first and the last;
    example 1 for nothing; the others have 0 to 8 ids a feature, drawn over all it has.
    """
    random = np.random.default_rng(_SEED)
    features = len(manifest.features)
    lengths = random.integers(0, IDS_PER_BAG_MAX + 1, (features, EXAMPLES), dtype=np.int32)
    lengths[:, 0] = 2
    lengths[:, 1] = 0
    maps = _map_per_feature(manifest, id_maps)
    lengths[[id_map is not None and not len(id_map) for id_map in maps]] = 0
    ids = [
        _sample_ids(random, int(length.sum()), rule, rows, id_map)
        for length, rule, rows, id_map in zip(
            lengths, manifest.rule_per_feature, manifest.rows_per_feature, maps, strict=True
        )
    ]
    flat = np.concatenate(ids)
    weights = random.uniform(-1, 2, len(flat)).astype(np.float32) if manifest.is_weighted else None
    return Bags(flat, lengths, weights)


def _map_per_feature(manifest: Manifest, id_maps: Mapping[str, IdMap]) -> list[IdMap | None]:
    first = {
        feature: table.name
        for table in reversed(manifest.tables)
        for feature in table.feature_names
    }
    return [id_maps.get(first[feature]) for feature in manifest.features]


def _sample_ids(
    random: np.random.Generator, count: int, rule: IdRule, rows: int, id_map: IdMap | None
) -> NDArray[np.int64]:
    if not count:
        return np.zeros(0, np.int64)
    if id_map is not None:
        return id_map.sample(random, count)[0]
    if rule.rule == "modulo":
        multiples = random.integers(-MULTIPLES_MAX, MULTIPLES_MAX, count)
        return random.integers(0, rule.modulus, count) + multiples * rule.modulus
    ids = random.integers(0, rows, count)
    ids[:2] = 0, rows - 1
    return ids


def row_numbers(bags: Bags, translator: IdTranslator) -> NDArray[np.int64]:
    """The row [n] that each id of ``bags`` means."""
    return translator.translate(bags.ids, bags.lengths.sum(axis=1)).rows


def pool(
    manifest: Manifest, bags: Bags, numbers: NDArray[np.int64], rows_of: RowsOf
) -> NDArray[np.float32]:
    """The answers to ``bags``, whose ids mean rows ``numbers``, added one by one in float32.

    A mean divides by the number of ids, also where they have weights, as FBGEMM does. Without
    pooling the rows themselves, [N, dim].
    """
    feature_start = np.concatenate(([0], np.cumsum(bags.lengths.sum(axis=1))))
    blocks = []
    for columns in manifest.columns:
        span = slice(feature_start[columns.feature], feature_start[columns.feature + 1])
        rows = rows_of(columns.table, numbers[span])
        if bags.weights is not None:
            rows = rows * bags.weights[span, None]
        if manifest.is_pooled:
            rows = pool_rows(rows, bags.lengths[columns.feature], columns.table.pooling)
        blocks.append(rows)
    return np.concatenate(blocks, axis=1 if manifest.is_pooled else 0)


def pool_rows(
    rows: NDArray[np.float32], lengths: NDArray[np.int32], pooling: str
) -> NDArray[np.float32]:
    """Rows [n, dim] of bags of ``lengths`` [B] as sums or means [B, dim]."""
    bags = np.split(rows, np.cumsum(lengths)[:-1])
    pooled: NDArray[np.float32] = np.stack([bag.sum(axis=0, dtype=np.float32) for bag in bags])
    if pooling == "mean":
        pooled /= np.maximum(lengths, 1).astype(np.float32)[:, None]
    return pooled


def pool_stored(
    manifest: Manifest, bags: Bags, numbers: NDArray[np.int64], tables: TablesFile
) -> NDArray[np.float32]:
    """The answers from the rows of tables.safetensors; reads those rows only."""

    def rows_of(table: TableSpec, wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        return stored_rows(tables, table, wanted)

    return pool(manifest, bags, numbers, rows_of)


def stored_rows(
    tables: TablesFile, table: TableSpec, numbers: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The values [n, dim] of a table's rows ``numbers``, as a lookup adds them up."""
    return dequantize_rows(tables.rows(table.name)[numbers], table.dtype, table.embedding_dim)


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


def load_goldens(path: Path, manifest: Manifest, translator: IdTranslator) -> Goldens:
    """Reads ``path`` and checks that it fits the manifest, and its ids the model's rules.

    Raises:
        StoreError: missing, damaged, or of other features, ids or dims than the manifest's.
    """
    tensors = _read_tensors(path)
    needed = {"ids", "lengths", "source_answers", "stored_answers"}
    needed |= {"weights"} if manifest.is_weighted else set()
    if tensors.keys() != needed:
        raise StoreError(f"{path}: has {sorted(tensors)}, expected {sorted(needed)}")
    _check_tensors(tensors, manifest, path)
    bags = Bags(tensors["ids"], tensors["lengths"], tensors.get("weights"))
    unknown = translator.translate(bags.ids, bags.lengths.sum(axis=1)).unknown
    if unknown is not None and unknown.any():
        raise StoreError(f"{path}: id {bags.ids[unknown.argmax()]} has no row in its table")
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
    lengths_shape = (len(manifest.features), examples)
    answers_shape = (examples, sum(manifest.length_per_key))
    if not manifest.is_pooled and lengths.shape == lengths_shape:
        totals = lengths.sum(axis=1)
        rows = sum(int(totals[columns.feature]) for columns in manifest.columns)
        answers_shape = (rows, manifest.tables[0].embedding_dim)
    expected = {
        "ids": ("int64", (ids.size,)),
        "lengths": ("int32", lengths_shape),
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
