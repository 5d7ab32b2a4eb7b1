"""Reads and writes goldens.safetensors: sample inputs of a model, and their results.

The file has ids as callers send them. It has both the results of the source model and the results
from the stored rows. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError, reading
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.regular_file import stat_regular
from embedserve_store.ids.translate import IdTranslator


@dataclass(frozen=True)
class Bags:
    """A KeyedJaggedTensor over the manifest's features: F features, B examples, n ids."""

    ids: NDArray[np.int64]
    """Ids [n], feature by feature, then example by example. They are as callers send them (string
    ids as hashes), and none is unknown."""
    lengths: NDArray[np.int32]
    """Number of ids of each bag, [F, B]."""
    weights: NDArray[np.float32] | None
    """Weights [n] of a weighted model; otherwise None."""

    def span(self, feature: int) -> slice:
        """Returns the slice of ``ids`` that the feature at index ``feature`` has."""
        ends = np.cumsum(self.lengths.sum(axis=1))
        return slice(int(ends[feature - 1]) if feature else 0, int(ends[feature]))

    def of(self, feature: int) -> Bags:
        """Returns the bags of the feature at index ``feature`` alone."""
        return self.take(self.span(feature), self.lengths[feature][None])

    def take(self, at: Any, lengths: NDArray[np.int32]) -> Bags:
        """Returns bags of ``lengths`` [F, B] with the ids at ``at``, an index of ``ids``."""
        return Bags(self.ids[at], lengths, None if self.weights is None else self.weights[at])


@dataclass(frozen=True)
class Goldens:
    """Inputs and their results, float32 [B, sum of dims] in the order of the manifest's keys.

    For an unpooled model the results are [N, dim], where each key has one row for each id of its
    feature.
    """

    bags: Bags
    source_answers: NDArray[np.float32]
    """Results of the source model."""
    stored_answers: NDArray[np.float32]
    """Results of the reference pooling (reference_pooling.py) from the stored rows."""


def save_goldens(goldens: Goldens, path: Path) -> None:
    """Writes ``goldens`` to ``path``; the caller syncs the file.

    Raises:
        OSError: the file cannot be written.
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
    """Reads ``path`` and checks its tensors against the manifest, and its ids against the id rules.

    Raises:
        StoreError: the file is missing or damaged, or its features, ids or dims do not match the
            manifest.
    """
    tensors, _ = read_safetensors(path)
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


def read_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Returns the tensors and the metadata of a file. Raises StoreError if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with reading(path):
            stat_regular(path)
            with safe_open(path, framework="numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return tensors, file.metadata() or {}
    except (SafetensorError, TypeError) as error:  # TypeError: numpy does not have the dtype
        raise StoreError(
            f"{path}: not a safetensors file that can be read, or truncated: {error}"
        ) from error


def _check_tensors(tensors: dict[str, NDArray[Any]], manifest: Manifest, path: Path) -> None:
    ids, lengths = tensors["ids"], tensors["lengths"]
    examples = lengths.shape[-1] if lengths.ndim else 0
    lengths_shape = (len(manifest.features), examples)
    is_shaped = lengths.shape == lengths_shape
    answers_shape = manifest.answers_shape(
        lengths if is_shaped else np.zeros(lengths_shape, np.int32)
    )
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
