"""Reads and writes a training model's inputs and outputs, against which publishing is checked.

The file is a safetensors file, which any training job can write. write_expected writes it from a
live module. Its ids are row numbers, as the module takes them. Never imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.goldens.goldens_file import Bags, read_safetensors

NAMES = ("features", "keys", "length_per_key")
"""Names of the fields in the file's metadata; each field is a JSON list."""
_CHECKSUMS = "checksums."
"""Prefix of the names of checksum tensors; the name of the table follows."""


@dataclass(frozen=True)
class Expected:
    """Bags of row numbers, and a training model's outputs for them."""

    features: tuple[str, ...]
    """Features of the bags, in the order of the bags."""
    keys: tuple[str, ...]
    """Keys of the outputs, in their order, as torchrec names them: a feature, or feature@table."""
    length_per_key: tuple[int, ...]
    bags: Bags
    answers: NDArray[np.float32]
    """Outputs of the model, [B, sum of length_per_key]. Without pooling [N, dim], where each key
    has one row for each id of its feature."""
    checksums: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)
    """Checksum (row_checksums.py) of each row, by table; empty if the file has no checksums."""

    @property
    def examples(self) -> int:
        return int(self.bags.lengths.shape[1])


def save_expected(expected: Expected, path: str | os.PathLike[str]) -> None:
    """Writes ``expected`` to ``path``, replacing any file there.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.numpy import save

    bags = expected.bags
    tensors: dict[str, NDArray[Any]] = {
        "ids": bags.ids,
        "lengths": bags.lengths,
        "answers": expected.answers,
    }
    if bags.weights is not None:
        tensors["weights"] = bags.weights
    tensors |= {f"{_CHECKSUMS}{table}": sums for table, sums in expected.checksums.items()}
    metadata = {name: json.dumps(getattr(expected, name)) for name in NAMES}
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    Path(path).write_bytes(save(contiguous, metadata))


def read_expected(path: str | os.PathLike[str]) -> Expected:
    """Reads a file written by save_expected or by a training job.

    Its tensors are:
        ids: int64 [n], feature by feature, then example by example.
        lengths: int32 [features, B].
        answers: float32.
        weights: float32 [n], for a weighted model.
        checksums.TABLE: uint64 [rows], for each table whose rows are all to be compared.

    Raises:
        StoreError: the file cannot be read, or does not have these tensors and metadata.
    """
    tensors, metadata = read_safetensors(Path(path))
    features, keys = (_names(metadata, name, path) for name in ("features", "keys"))
    dims = _list(metadata, "length_per_key", int, path)
    needed = {"ids": np.int64, "lengths": np.int32, "answers": np.float32}
    for name, dtype in (needed | {"weights": np.float32}).items():
        if name not in tensors:
            if name != "weights":
                raise StoreError(f"{path}: has no tensor {name!r}")
        elif tensors[name].dtype != dtype:
            expected = np.dtype(dtype).name
            raise StoreError(f"{path}: {name} is {tensors[name].dtype.name}, expected {expected}")
    bags = Bags(tensors["ids"], tensors["lengths"], tensors.get("weights"))
    checksums = _checksums(tensors, path)
    read = Expected(features, keys, tuple(dims), bags, tensors["answers"], checksums)
    _check(read, path)
    return read


def _checksums(tensors: dict[str, NDArray[Any]], path: object) -> dict[str, NDArray[np.uint64]]:
    found = {name: one for name, one in tensors.items() if name.startswith(_CHECKSUMS)}
    for name, one in found.items():
        if one.dtype != np.uint64 or one.ndim != 1:
            shape = list(one.shape)
            raise StoreError(f"{path}: {name} is {one.dtype.name} {shape}, expected uint64 [rows]")
    return {name.removeprefix(_CHECKSUMS): one for name, one in found.items()}


def _names(metadata: dict[str, str], name: str, path: object) -> tuple[str, ...]:
    names = _list(metadata, name, str, path)
    if len(set(names)) < len(names):
        raise StoreError(f"{path}: {name} of its metadata has one twice: {names}")
    return tuple(names)


def _list(metadata: dict[str, str], name: str, kind: type, path: object) -> list[Any]:
    try:
        values = json.loads(metadata.get(name, ""))
    except (ValueError, RecursionError):
        values = None
    is_right = isinstance(values, list) and values and all(type(one) is kind for one in values)
    if not is_right:
        raise StoreError(
            f"{path}: {name} of its metadata is {metadata.get(name)!r:.80}, expected a JSON list "
            f"of {kind.__name__}"
        )
    result: list[Any] = values
    return result


def _check(expected: Expected, path: object) -> None:
    """Raises StoreError if the fields of ``expected`` contradict each other.

    Also rejects outputs and weights that are not finite.
    """
    bags, features = expected.bags, expected.features
    if bags.lengths.ndim != 2 or bags.lengths.shape[0] != len(features) or not bags.lengths.size:
        raise StoreError(
            f"{path}: lengths is {list(bags.lengths.shape)}, expected [{len(features)} features, "
            "examples]"
        )
    if bags.ids.ndim != 1 or bags.lengths.min() < 0 or bags.lengths.sum() != bags.ids.size:
        raise StoreError(f"{path}: lengths do not add up to its {bags.ids.size} ids")
    if bags.weights is not None and bags.weights.shape != bags.ids.shape:
        raise StoreError(f"{path}: weights is {list(bags.weights.shape)}, expected one for each id")
    if len(expected.length_per_key) != len(expected.keys):
        raise StoreError(
            f"{path}: length_per_key has {len(expected.length_per_key)} widths for "
            f"{len(expected.keys)} keys"
        )
    for name, values in (("answers", expected.answers), ("weights", bags.weights)):
        if values is not None and not np.isfinite(values).all():
            raise StoreError(f"{path}: {name} has a value that is not finite")
