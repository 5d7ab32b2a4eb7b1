"""goldens.safetensors: a few inputs of a model and the answers they must get.

Keeps ids as callers have them, and the answers of the source model beside those of the rows as
stored. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.ids.translate import IdTranslator


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

    def span(self, feature: int) -> slice:
        """Returns where the ids of the feature at this position lie."""
        ends = np.cumsum(self.lengths.sum(axis=1))
        return slice(int(ends[feature - 1]) if feature else 0, int(ends[feature]))

    def of(self, feature: int) -> Bags:
        """Returns the bags of the feature at this position alone."""
        span = self.span(feature)
        weights = None if self.weights is None else self.weights[span]
        return Bags(self.ids[span], self.lengths[feature][None], weights)


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
