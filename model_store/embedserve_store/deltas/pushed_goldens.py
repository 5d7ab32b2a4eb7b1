"""Makes the goldens of a delta from bags and the results that a training job has for them.

Imports torch only when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from embedserve_store.deltas.encode_changes import RowsOfIds, check_pair, copy_values
from embedserve_store.errors import InvalidModelError, checking_model
from embedserve_store.format.delta_goldens import TRAINING_DTYPES, DeltaGoldens
from embedserve_store.format.manifest import Manifest
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.parity import least_precise
from embedserve_store.publishing.ranks import Ranks
from embedserve_store.sources import live, live_dmp

GoldenBags = Any
"""Bags, or a KeyedJaggedTensor that has the features of the version."""
GivenGoldens = tuple[GoldenBags, Any]
"""Bags, and the results that they have."""


class PushedGoldens:
    """Makes the goldens that come with a push: those of rank 0, the same on all ranks."""

    def __init__(self, base: Manifest, ranks: Ranks) -> None:
        self._base, self._ranks = base, ranks

    def copy(self, goldens: GivenGoldens | None) -> GivenGoldens | None:
        """Returns copies of bags and results on the CPU, those of rank 0 alone."""
        if goldens is None or self._ranks.rank != 0:
            return None
        bags, answers = check_pair(goldens, "goldens", "(bags, results)")
        return _bags_of(bags, self._base), copy_values(answers)

    def encode(
        self, goldens: Callable[[], GivenGoldens | None], rows_of: Mapping[str, RowsOfIds]
    ) -> DeltaGoldens | None:
        """Returns the given bags of callers' ids with their results; a collective.

        Args:
            goldens: returns bags and results, or raises.
            rows_of: functions that return the rows of ids after the delta, by table.
        """
        return self._ranks.on_first(lambda: self._encode(goldens(), rows_of))

    def look_up(
        self, goldens: GoldenBags | None, module: Any, prefix: str, dtype: str
    ) -> DeltaGoldens | None:
        """Returns bags of row numbers with the results of the model in training; a collective,
        also over training's process group.

        Args:
            module: the sharded model.
            dtype: least precise dtype of this rank's shards.
        """
        if not self._ranks.flag_from_first(goldens is not None):
            return None
        base = self._base
        bags = self._ranks.on_first(lambda: _checked(_bags_of(goldens, base), base))
        answers = self._ranks.on_all(lambda: _trained_answers(module, prefix, base, bags))
        least = least_precise(*self._ranks.from_all(dtype))
        return self._ranks.on_first(lambda: _delta_goldens(bags, answers, least, base))

    def _encode(
        self, goldens: GivenGoldens | None, rows_of: Mapping[str, RowsOfIds]
    ) -> DeltaGoldens | None:
        if goldens is None:
            return None
        bags, answers = check_pair(goldens, "goldens", "(bags, results)")
        numbers = _with_row_numbers(_bags_of(bags, self._base), self._base, rows_of)
        return _delta_goldens(numbers, answers, TRAINING_DTYPES[0], self._base)


def _bags_of(goldens: GoldenBags, base: Manifest) -> Bags:
    """Returns a copy of ``goldens`` as bags in the order of the version's features.

    Raises:
        InvalidModelError: they are of another type, or lack a feature.
    """
    if isinstance(goldens, Bags):
        return Bags(
            np.array(goldens.ids, np.int64),
            np.array(goldens.lengths, np.int32),
            None if goldens.weights is None else np.array(goldens.weights, np.float32),
        )
    if not (hasattr(goldens, "keys") and hasattr(goldens, "to_dict")):
        raise InvalidModelError(
            f"goldens are a {type(goldens).__name__}, expected Bags or a KeyedJaggedTensor"
        )
    if missing := set(base.features) - {*goldens.keys()}:
        raise InvalidModelError(f"goldens have no feature {min(missing)!r}")
    by_feature = goldens.to_dict()
    jagged = [by_feature[feature] for feature in base.features]
    if len(counts := {len(one.lengths()) for one in jagged}) > 1:
        raise InvalidModelError(
            f"goldens have {min(counts)} to {max(counts)} bags by feature: batch sizes that vary "
            "by feature (VBE) cannot be goldens, only one bag of each feature for each example"
        )
    weights = [one.weights_or_none() for one in jagged] if base.is_weighted else [None]
    return Bags(
        np.concatenate([_array(one.values()) for one in jagged]).astype(np.int64),
        np.stack([_array(one.lengths()) for one in jagged]).astype(np.int32),
        None
        if any(one is None for one in weights)
        else np.concatenate([_array(one) for one in weights]).astype(np.float32),
    )


def _with_row_numbers(bags: Bags, base: Manifest, rows_of: Mapping[str, RowsOfIds]) -> Bags:
    """Returns ``bags`` with row numbers in place of ids of a vocabulary.

    Args:
        bags: bags in the order of the version's features.
        rows_of: functions that return the rows of ids, by table with a vocabulary.

    Raises:
        InvalidModelError: an id is not in its vocabulary, or the sizes contradict each other.
    """
    _check_sizes(bags, base)
    numbers = bags.ids.copy()
    for feature, (name, table) in enumerate(
        zip(base.features, base.table_per_feature, strict=True)
    ):
        if (find := rows_of.get(table.name)) is None:
            continue
        span = bags.span(feature)
        numbers[span] = find(bags.ids[span])
        if (numbers[span] < 0).any():
            unknown = bags.ids[span][(numbers[span] < 0).argmax()]
            raise InvalidModelError(
                f"goldens: feature {name!r}: id {unknown} is not in the vocabulary"
            )
    return Bags(numbers, bags.lengths, bags.weights)


def _checked(bags: Bags, base: Manifest) -> Bags:
    """Returns ``bags`` of row numbers. Raises InvalidModelError unless they can be looked up in the
    version, and can be goldens with their results."""
    _check_sizes(bags, base)
    _delta_goldens(
        bags, np.zeros(base.answers_shape(bags.lengths), np.float32), TRAINING_DTYPES[0], base
    )
    return bags


def _check_sizes(bags: Bags, base: Manifest) -> None:
    """Raises InvalidModelError unless ``bags`` are bags of the version's features."""
    lengths, features = bags.lengths, len(base.features)
    if lengths.ndim != 2 or len(lengths) != features or bags.ids.ndim != 1:
        raise InvalidModelError(
            f"goldens: ids are {list(bags.ids.shape)} and lengths {list(lengths.shape)}, expected "
            f"[n] and [{features} features, examples]"
        )
    if lengths.min(initial=0) < 0 or lengths.sum(dtype=np.int64) != len(bags.ids):
        raise InvalidModelError(f"goldens: lengths do not add up to {len(bags.ids)} ids")


def _delta_goldens(bags: Bags, answers: Any, dtype: str, base: Manifest) -> DeltaGoldens:
    """Returns the goldens with ``answers``, the results for ``bags`` of row numbers.

    Args:
        answers: array or tensor in the shape of DeltaGoldens.answers.
        dtype: dtype in which training adds rows up; a smaller dtype of ``answers`` replaces it.

    Raises:
        InvalidModelError: they exceed a limit, or do not fit the version.
    """
    import torch

    results = torch.as_tensor(answers)
    own = str(results.dtype).removeprefix("torch.")
    if own not in TRAINING_DTYPES:
        raise InvalidModelError(
            f"goldens: answers are {own}, expected {', '.join(TRAINING_DTYPES)}"
        )
    values = results.detach().float().cpu().numpy()
    made = DeltaGoldens(bags.ids, bags.lengths, bags.weights, values, least_precise(own, dtype))
    with checking_model():
        made.check(base, f"model {base.model!r}")
    return made


def _trained_answers(module: Any, prefix: str, base: Manifest, bags: Bags) -> Any:
    """Returns a sharded model's results for ``bags``.

    A collective of all ranks, which all have the same bags. Changes nothing in the model: neither
    the optimizer nor TorchRec's tracker takes the lookup for one of training.

    Raises:
        InvalidModelError: the model has other features, poolings or weights than the version.
    """
    tables, is_weighted, path = live_dmp.describe_sharded(module, prefix)
    trained = Manifest("", 0, tables, is_weighted)
    _check_same(trained, base)
    with live_dmp.side_effect_free_twin(module, path) as collection:
        return live.outputs(collection, base, bags).cpu()


def _check_same(trained: Manifest, base: Manifest) -> None:
    for what, own, stored in (
        ("the keys", sorted(trained.keys), sorted(base.keys)),
        ("is_weighted", trained.is_weighted, base.is_weighted),
        ("is_pooled", trained.is_pooled, base.is_pooled),
    ):
        if own != stored:
            raise InvalidModelError(
                f"goldens: {what} of the model in training: {own}, of version {base.version} of "
                f"{base.model!r}: {stored}"
            )


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().cpu().numpy()
    return array
