"""Joins the requests of one batch into the engine's input, and checks them all at once.

Pure functions on numpy arrays: no Python runs for each id. A request that is wrong is told
apart from its neighbours (checks.py), which are joined without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedserve.bag_order import bags_to_ids, feature_major_order
from embedserve.checks import check_kinds, check_lengths
from embedserve.errors import InvalidRequestError
from embedserve.translation import translate
from embedserve.types import Batch, LookupRequest, ModelInfo


def to_model_order(request: LookupRequest, model: ModelInfo) -> LookupRequest:
    """``request`` with every feature of ``model``, in its order; those not named are empty bags.

    Raises:
        InvalidRequestError: a feature that the model does not have, ids or weights of a kind
            that it does not take, or lengths that do not add up.
    """
    if not model.is_pooled or request.string_features or model.string_features:
        check_kinds(request, model)
    if request.features == model.features:
        return request
    for feature in request.features:
        if feature not in model.features:
            raise InvalidRequestError(
                f"features.{feature}: model {model.name!r} has no such feature; "
                f"it has {', '.join(model.features)}",
                f"features.{feature}",
            )
    check_lengths(request.lengths, request.ids.size)
    lengths = request.lengths.reshape(len(request.features), request.batch_size)
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
    positions = {feature: i for i, feature in enumerate(request.features)}
    order = [positions.get(feature, -1) for feature in model.features]
    slices = [slice(ends[i - 1] if i else 0, ends[i]) for i in order if i >= 0]
    no_ids = np.zeros(request.batch_size, np.int32)
    return LookupRequest(
        model=request.model,
        features=model.features,
        ids=np.concatenate([request.ids[s] for s in slices]),
        lengths=np.concatenate([lengths[i] if i >= 0 else no_ids for i in order]),
        weights=(
            None
            if request.weights is None
            else np.concatenate([request.weights[s] for s in slices])
        ),
        batch_size=request.batch_size,
        string_features=request.string_features,
        strings=request.strings,
    )


def join(requests: Sequence[LookupRequest], model: ModelInfo) -> Batch | None:
    """The batch of ``requests`` (each in the model's order), one after the other.

    None where one of them is invalid: ``find_invalid`` tells which and why.
    """
    lengths = _concatenate([request.lengths for request in requests])
    ids = _concatenate([request.ids for request in requests])
    if not _lengths_add_up(lengths, requests):
        return None
    weights = None
    if any(request.weights is not None for request in requests):
        weights = _concatenate([_weights_or_ones(request) for request in requests])
        if not np.isfinite(weights).all():
            return None
    sizes = [request.batch_size for request in requests]
    batch = Batch(ids, lengths, weights, sizes, sum(sizes))
    if len(requests) > 1:
        _make_feature_major(batch, len(model.features))
    if model.translator.is_identity:
        return batch if _ids_are_rows(batch, model) else None
    return batch if translate(batch, model) else None


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _lengths_add_up(lengths: np.ndarray, requests: Sequence[LookupRequest]) -> bool:
    if lengths.min() < 0:
        return False
    bags_before = [0]
    for request in requests[:-1]:
        bags_before.append(bags_before[-1] + request.lengths.size)
    totals = np.add.reduceat(lengths, bags_before, dtype=np.int64)
    return bool(totals.tolist() == [request.ids.size for request in requests])


def _make_feature_major(batch: Batch, features: int) -> None:
    bag_order = feature_major_order(np.array(batch.sizes), features)
    id_order = bags_to_ids(batch.lengths, bag_order)
    batch.lengths = batch.lengths[bag_order]
    batch.ids = batch.ids[id_order]
    if batch.weights is not None:
        batch.weights = batch.weights[id_order]


def _ids_are_rows(batch: Batch, model: ModelInfo) -> bool:
    ids_per_feature = batch.lengths.reshape(len(model.features), -1).sum(axis=1)
    limits = np.repeat(model.translator.limits, ids_per_feature)
    # A negative id is past every limit once it is read as unsigned.
    return not (batch.ids.view(np.uint64) >= limits).any()


def _weights_or_ones(request: LookupRequest) -> np.ndarray:
    if request.weights is not None:
        return request.weights
    return np.ones(request.ids.size, np.float32)
