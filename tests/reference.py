"""Expected vectors, computed without the server: by nn.EmbeddingBag and plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from half import rows_in_half
from torch import nn

from embedserve_store import Manifest, ModelVersion
from embedserve_store.format.row_layout import dequantize_rows

if TYPE_CHECKING:
    from torchrec import EmbeddingBagCollection

Bags = Mapping[str, Sequence[Sequence[int]]]
Weights = Mapping[str, Sequence[Sequence[float]]]


def pooled(
    table: np.ndarray,
    bags: Sequence[Sequence[int]],
    pooling: str = "sum",
    weights: Sequence[Sequence[float]] | None = None,
) -> np.ndarray:
    """Returns float32 [B, dim] from torch's nn.EmbeddingBag over ``table``."""
    mode = "sum" if weights is not None else pooling
    module = nn.EmbeddingBag.from_pretrained(torch.from_numpy(table), mode=mode)
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    offsets = torch.tensor(np.cumsum([0, *[len(bag) for bag in bags[:-1]]]), dtype=torch.int64)
    flat = None if weights is None else torch.tensor([w for bag in weights for w in bag])
    values = module(ids, offsets, per_sample_weights=flat).numpy()
    if pooling == "mean" and weights is not None:
        values = values / np.maximum([[len(bag)] for bag in bags], 1)
    result: np.ndarray = values
    return result


def dequantized_int8(table: np.ndarray) -> np.ndarray:
    """Returns ``table`` after quantization to 8 bits and back, computed like FBGEMM does for a row.

    A row's scale is its range divided by 255 and its bias is its minimum, both as float16. Each
    value becomes the nearest of bias + scale * 0 … 255.
    """
    low = table.min(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
    span = table.max(axis=1, keepdims=True) - low
    scale = np.where(span == 0, 1, span / 255).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((table - low) / scale), 0, 255)
    result: np.ndarray = (codes * scale + low).astype(np.float32)
    return result


def random_bags(
    rng: np.random.Generator, rows: Mapping[str, int], batch_size: int, ids_max: int = 8
) -> dict[str, list[list[int]]]:
    """Returns random jagged ids for each feature, including empty bags."""
    return {
        feature: [
            rng.integers(0, count, rng.integers(0, ids_max + 1)).tolist() for _ in range(batch_size)
        ]
        for feature, count in rows.items()
    }


def to_kjt(bags: Bags, features: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids int64 [n], lengths int32 [F * B]), feature-major."""
    ids = [i for feature in features for bag in bags[feature] for i in bag]
    lengths = [len(bag) for feature in features for bag in bags[feature]]
    return np.array(ids, np.int64), np.array(lengths, np.int32)


def assert_same(actual: Any, expected: np.ndarray, relative: float = 1e-6) -> None:
    """Checks equality within ``relative`` of the largest expected magnitude.

    The order of float32 sums varies.
    """
    scale = float(np.abs(expected).max(initial=1e-30))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=relative * scale)


def sample(version: ModelVersion, batch_size: int = 7) -> dict[str, list[list[int]]]:
    """Returns random_bags over all features of ``version``."""
    manifest = version.manifest
    rows = dict(zip(manifest.features, manifest.rows_per_feature, strict=True))
    return random_bags(np.random.default_rng(5), rows, batch_size)


def stored_rows(version: ModelVersion, *, as_float16: bool = False) -> dict[str, np.ndarray]:
    """Returns every table of ``version`` as float32, dequantized by numpy.

    Args:
        as_float16: dequantizes like GPUs do.
    """
    dequantize = rows_in_half if as_float16 else dequantize_rows
    return {
        table.name: dequantize(version.tables.rows(table.name), table.dtype, table.embedding_dim)
        for table in version.manifest.tables
    }


def expected(
    tables: Mapping[str, np.ndarray],
    manifest: Manifest,
    bags: Bags,
    weights: Weights | None = None,
) -> np.ndarray:
    """Returns the expected response to ``bags``, computed from float32 ``tables``.

    It is float32 [B, sum(dims)] in ``manifest.keys`` order.
    """
    blocks = [
        pooled(
            tables[table.name],
            bags[feature],
            table.pooling,
            None if weights is None else weights[feature],
        )
        for table in manifest.tables
        for feature in table.feature_names
    ]
    return np.concatenate(blocks, axis=1)


def source_rows(ebc: EmbeddingBagCollection) -> dict[str, np.ndarray]:
    return {name: bag.weight.detach().numpy() for name, bag in ebc.embedding_bags.items()}


def check_vectors(
    lookup: Callable[..., np.ndarray],
    version: ModelVersion,
    tables: Mapping[str, np.ndarray],
    batch_size: int = 7,
) -> None:
    """Compares the result of a sample with the vectors computed from float32 ``tables``."""
    bags = sample(version, batch_size)
    result = lookup(*to_kjt(bags, version.manifest.features))
    assert_same(result, expected(tables, version.manifest, bags))


def check_concurrent_lookups(
    lookup: Callable[..., np.ndarray],
    requests: Sequence[Sequence[Any]],
    calls: int,
    alone: Callable[..., np.ndarray] | None = None,
) -> None:
    """Checks that each of four threads gets the results that ``alone``, or else ``lookup`` itself,
    returns before."""
    results = [(alone or lookup)(*one) for one in requests]

    def is_right(number: int) -> bool:
        which = number % len(requests)
        return np.array_equal(lookup(*requests[which]), results[which])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(calls)))
