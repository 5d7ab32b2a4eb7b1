"""Joins the requests of one batch into the engine's input, and checks them all at once.

Pure functions on numpy arrays: no Python runs for each id. A request that is wrong is told
apart from its neighbours, which are joined without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedserve.errors import InvalidRequestError
from embedserve.types import LookupRequest, ModelInfo


@dataclass(slots=True)
class Batch:
    """The engine's input for several requests.

    Attributes:
        ids: int64 [n], feature-major over the whole batch.
        lengths: int32 [F * B], feature-major, B the examples of all requests in their order.
        weights: float32 [n], or None where no request has any.
        batch_size: B.
    """

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    batch_size: int


def to_model_order(request: LookupRequest, model: ModelInfo) -> LookupRequest:
    """``request`` with every feature of ``model``, in its order; those not named are empty bags.

    Raises:
        InvalidRequestError: a feature that the model does not have, or lengths that do not add up.
    """
    if request.features == model.features:
        return request
    for feature in request.features:
        if feature not in model.features:
            raise InvalidRequestError(
                f"features.{feature}: model {model.name!r} has no such feature; "
                f"it has {', '.join(model.features)}",
                f"features.{feature}",
            )
    check_lengths(request)
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
    )


def check_lengths(request: LookupRequest) -> None:
    """Raises InvalidRequestError unless the lengths are a partition of the ids."""
    lengths = request.lengths
    if lengths.size and lengths.min() < 0:
        position = int((lengths < 0).argmax())
        raise InvalidRequestError(
            f"lengths[{position}] is {lengths[position]}: a bag cannot hold fewer than 0 ids",
            f"lengths[{position}]",
        )
    total = int(lengths.sum(dtype=np.int64))
    if total != request.ids.size:
        raise InvalidRequestError(
            f"lengths add up to {total}, but there are {request.ids.size} ids", "lengths"
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
    batch = Batch(ids, lengths, weights, sum(request.batch_size for request in requests))
    if len(requests) > 1:
        _make_feature_major(batch, requests, len(model.features))
    return batch if _ids_are_rows(batch, model) else None


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


def _make_feature_major(batch: Batch, requests: Sequence[LookupRequest], features: int) -> None:
    sizes = np.array([request.batch_size for request in requests])
    bag_order = feature_major_order(sizes, features)
    id_order = bags_to_ids(batch.lengths, bag_order)
    batch.lengths = batch.lengths[bag_order]
    batch.ids = batch.ids[id_order]
    if batch.weights is not None:
        batch.weights = batch.weights[id_order]


def _ids_are_rows(batch: Batch, model: ModelInfo) -> bool:
    ids_per_feature = batch.lengths.reshape(len(model.features), -1).sum(axis=1)
    limits = np.repeat(model.row_limits, ids_per_feature)
    # A negative id is past every limit once it is read as unsigned.
    return not (batch.ids.view(np.uint64) >= limits).any()


def _weights_or_ones(request: LookupRequest) -> np.ndarray:
    if request.weights is not None:
        return request.weights
    return np.ones(request.ids.size, np.float32)


def feature_major_order(sizes: np.ndarray, features: int) -> np.ndarray:
    """Positions of the bags of requests of ``sizes`` examples in feature-major order.

    Requests one after the other hold [features, size] bags each; the batch holds
    [features, sum(sizes)]. result[i] is where the batch's i-th bag stands in the requests.

    >>> feature_major_order(np.array([1, 2]), 2)
    array([0, 2, 3, 1, 4, 5])
    """
    starts = np.cumsum(sizes * features) - sizes * features
    examples_before = np.cumsum(sizes) - sizes
    # For each example of the batch: its request's first bag, size, and its place in the request.
    first_bag = np.repeat(starts, sizes)
    place = np.arange(sizes.sum()) - np.repeat(examples_before, sizes)
    stride = np.repeat(sizes, sizes)
    order: np.ndarray = first_bag + place + np.arange(features)[:, None] * stride
    return order.reshape(-1)


def bags_to_ids(lengths: np.ndarray, bag_order: np.ndarray) -> np.ndarray:
    """Positions of the ids when bags of ``lengths`` are put in ``bag_order``.

    >>> bags_to_ids(np.array([2, 1, 3]), np.array([1, 2, 0]))
    array([2, 3, 4, 5, 0, 1])
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    ordered = lengths[bag_order]
    ordered_ends = np.cumsum(ordered, dtype=np.int64)
    shift = (ends - lengths)[bag_order] - (ordered_ends - ordered)
    total = int(ordered_ends[-1]) if ordered_ends.size else 0
    return np.repeat(shift, ordered) + np.arange(total)


def find_invalid(
    requests: Sequence[LookupRequest], model: ModelInfo
) -> dict[int, InvalidRequestError]:
    """Which of ``requests`` (by position) may not be looked up, and why."""
    errors: dict[int, InvalidRequestError] = {}
    for i, request in enumerate(requests):
        try:
            check_lengths(request)
            check_ids(request, model)
            check_weights(request)
        except InvalidRequestError as error:
            errors[i] = error
    return errors


def check_ids(request: LookupRequest, model: ModelInfo) -> None:
    """Raises InvalidRequestError for an id that is not a row number of its table."""
    limits = np.repeat(np.repeat(model.row_limits, request.batch_size), request.lengths)
    wrong = request.ids.view(np.uint64) >= limits
    if not wrong.any():
        return
    position = int(wrong.argmax())
    feature, example, place = _place(request, position)
    name = model.features[feature]
    field = f"features.{name}[{example}][{place}]"
    others = int(wrong.sum()) - 1
    raise InvalidRequestError(
        f"{field} is {request.ids[position]}: ids of {name!r} are row numbers from 0 to "
        f"{model.rows_per_feature[feature] - 1}"
        + (f" ({others} more are wrong)" if others else ""),
        field,
    )


def check_weights(request: LookupRequest) -> None:
    """Raises InvalidRequestError for a weight that is infinite or not a number."""
    if request.weights is None:
        return
    wrong = ~np.isfinite(request.weights)
    if not wrong.any():
        return
    position = int(wrong.argmax())
    feature, example, place = _place(request, position)
    field = f"weights.{request.features[feature]}[{example}][{place}]"
    raise InvalidRequestError(
        f"{field} is {request.weights[position]}: weights are finite numbers", field
    )


def _place(request: LookupRequest, position: int) -> tuple[int, int, int]:
    """(feature, example, place in the bag) of the id at ``position``."""
    ends = np.cumsum(request.lengths, dtype=np.int64)
    bag = int(np.searchsorted(ends, position, side="right"))
    start = int(ends[bag]) - int(request.lengths[bag])
    return bag // request.batch_size, bag % request.batch_size, position - start
