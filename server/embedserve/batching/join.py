"""Joins the requests of one batch into the engine's input, with row numbers in place of ids, and
validates them together.

Pure functions on numpy arrays: no Python runs per id. If the batch is invalid, validation.py finds
the invalid requests, and the other requests of the batch are joined without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from msgspec.structs import replace

from embedserve.batching.permutations import bags_to_ids, feature_major_order
from embedserve.batching.validation import (
    check_output,
    coerce_id_types,
    find_invalid,
    name_features,
)
from embedserve.deltas.rows_reader import BatchView, RowsReader
from embedserve.errors import InvalidRequestError, shortened
from embedserve.lookup_types import Batch, LookupRequest
from embedserve.model_info import ModelInfo
from embedserve.request_checks import check_lengths
from embedserve_store.ids.translate import OverrideRows

CACHED_BAGS_MAX = 4096
"""Maximum number of bags of a batch whose shape is cached.

It bounds the bag order in one cache entry to 32 KiB, 8 bytes per bag."""


def adapt_to_model(
    request: LookupRequest, model: ModelInfo, *, is_lenient: bool = False
) -> LookupRequest:
    """Validates ``request`` against ``model``; returns it with the model's features, in its order.

    Features that the request does not name get empty bags. ``request`` itself may be changed: names
    of features are added to it, and its output keys become the model's own strings.

    Args:
        is_lenient: whether features that the model does not have are dropped.

    Raises:
        InvalidRequestError: the model lacks a feature or output key, or does not accept the type of
            ids or the weights. Also if lengths do not add up, or if the features have no names and
            their number differs from the model's.
    """
    if not request.features:
        name_features(request, model)
    if not model.is_pooled or request.string_features or model.string_features:
        request = coerce_id_types(request, model)
    if request.output is not None:
        request.output = check_output(request.output, model)
    if request.features == model.features:
        return request
    if not is_lenient:
        _check_features(request, model)
    check_lengths(request.lengths, request.ids.size)
    lengths = request.lengths.reshape(len(request.features), request.batch_size)
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
    positions = {feature: i for i, feature in enumerate(request.features)}
    order = [positions.get(feature, -1) for feature in model.features]
    slices = [slice(ends[i - 1] if i else 0, ends[i]) for i in order if i >= 0]
    no_ids = np.zeros(request.batch_size, np.int32)
    weights = request.weights
    return replace(
        request,
        features=model.features,
        ids=np.concatenate([request.ids[s] for s in slices]),
        lengths=np.concatenate([lengths[i] if i >= 0 else no_ids for i in order]),
        weights=None if weights is None else np.concatenate([weights[s] for s in slices]),
    )


def check_names(request: LookupRequest, model: ModelInfo) -> None:
    """Validates the names in ``request``, as ``adapt_to_model`` does, in a time that does not
    depend on its numbers of ids and examples.

    The request then keeps no text of its client but ids and names of features of ``model``.

    Raises:
        InvalidRequestError: the model lacks a feature or output key, or the features have no names
            and their number differs from the model's.
    """
    if not request.features:
        name_features(request, model)
    if request.output is not None:
        request.output = check_output(request.output, model)
    if request.features != model.features:
        _check_features(request, model)


def _check_features(request: LookupRequest, model: ModelInfo) -> None:
    for feature in request.features:
        if feature not in model.feature_positions:
            field = f"features.{shortened(feature)}"
            raise InvalidRequestError(
                f"{field}: model {model.name!r} has no such feature; "
                f"it has {', '.join(model.features)}",
                field,
            )


def join(
    requests: Sequence[LookupRequest], model: ModelInfo, override_rows: OverrideRows | None = None
) -> Batch | None:
    """Returns the batch of ``requests``, each in the model's order, one after the other.

    Returns None if a request is invalid; ``find_invalid`` then returns the errors.

    Args:
        override_rows: writes the rows of ids that have changed since publishing, as in
            IdTranslator.translate.
    """
    if len(requests) == 1:
        only = requests[0]
        batch = Batch(only.ids, only.lengths, only.weights, [only.batch_size], only.batch_size)
        if only.lengths.min() < 0 or only.lengths.sum(dtype=np.int64) != only.ids.size:
            return None
    elif (joined := _join_several(requests, len(model.features))) is not None:
        batch = joined
    else:
        return None
    if batch.weights is not None and not np.isfinite(batch.weights).all():
        return None
    batch.ids_per_feature = batch.lengths.reshape(len(model.features), -1).sum(axis=1)
    if not model.translator.is_identity:
        return batch if _translate(batch, model, override_rows) else None
    limits = np.repeat(model.translator.limits, batch.ids_per_feature)
    # A negative id exceeds every limit when its bits are read as unsigned.
    return None if (batch.ids.view(np.uint64) >= limits).any() else batch


def _translate(batch: Batch, model: ModelInfo, override_rows: OverrideRows | None = None) -> bool:
    """Replaces the ids of ``batch`` by row numbers; returns False if an unknown id is rejected.

    The rule of its table decides about an unknown id: its request is rejected, the id is skipped,
    or the table's default row is looked up. Skipped and default ids are counted by request and
    feature.

    Args:
        override_rows: as in IdTranslator.translate.
    """
    translation = model.translator.translate(batch.ids, batch.ids_per_feature, override_rows)
    batch.ids = translation.rows
    if translation.unknown is None:
        return True
    positions = np.flatnonzero(translation.unknown)
    bags = np.searchsorted(np.cumsum(batch.lengths, dtype=np.int64), positions, side="right")
    features, examples = np.divmod(bags, batch.batch_size)
    if model.rejects_unknown[features].any():
        return False
    batch.unknown_counts = _count(batch.sizes, features, examples, len(model.features))
    is_skipped = model.skips_unknown[features]
    if is_skipped.any():
        _skip(batch, positions[is_skipped], bags[is_skipped], model.is_pooled)
    return True


def _count(
    sizes: list[int], features: np.ndarray, examples: np.ndarray, feature_count: int
) -> np.ndarray:
    """Counts ids, given their ``features`` and ``examples``: int64 [requests, feature_count]."""
    requests = np.searchsorted(np.cumsum(sizes), examples, side="right")
    places = requests * feature_count + features
    return np.bincount(places, minlength=len(sizes) * feature_count).reshape(-1, feature_count)


def _skip(batch: Batch, positions: np.ndarray, bags: np.ndarray, is_pooled: bool) -> None:
    """Removes ids from their bags, so that a mean divides by the number of remaining ids.

    An unpooled result has a row for each id sent, so its ids stay. Their positions are recorded in
    ``batch.skipped``, and their rows are zeroed after the lookup.
    """
    if not is_pooled:
        batch.skipped = positions
        return
    batch.ids = np.delete(batch.ids, positions)
    if batch.weights is not None:
        batch.weights = np.delete(batch.weights, positions)
    # A new array: with a single request the batch shares the request's array.
    batch.lengths = batch.lengths - np.bincount(bags, minlength=batch.lengths.size).astype(np.int32)


def begin_view(reader: RowsReader | None) -> BatchView | None:
    """Returns the view for a batch that begins now; None where no row ever changes."""
    return None if reader is None else BatchView(reader)


def join_valid(
    requests: Sequence[LookupRequest], model: ModelInfo, view: BatchView | None = None
) -> tuple[Batch | None, dict[int, InvalidRequestError]]:
    """Returns the batch of the valid ``requests``, and the errors of the others by position.

    The batch is None if no request is valid.

    Args:
        requests: requests in the model's order.
        view: view that the batch is looked up in; None where rows and ids never change.
    """
    override_rows = None if view is None else view.override_rows
    errors: dict[int, InvalidRequestError] = {}
    batch = join(requests, model, override_rows)
    if batch is None:
        errors = find_invalid(requests, model, override_rows)
        valid = [request for i, request in enumerate(requests) if i not in errors]
        batch = join(valid, model, override_rows) if valid else None
        if valid and batch is None:
            raise AssertionError("a batch is invalid, but none of its requests")
    if batch is not None:
        batch.view = view
    return batch, errors


def adapt_and_join(
    requests: Sequence[LookupRequest],
    model: ModelInfo,
    view: BatchView | None = None,
    *,
    is_lenient: bool = False,
) -> tuple[Batch | None, dict[int, LookupRequest], dict[int, InvalidRequestError]]:
    """Joins the valid ``requests``, whose features may be in any order.

    Args:
        view: as in ``join_valid``.
        is_lenient: as in ``adapt_to_model``.

    Returns:
        The batch, None if no request is valid; its requests in the model's order, and the errors
        of the others, both by position in ``requests``.
    """
    adapted: dict[int, LookupRequest] = {}
    errors: dict[int, InvalidRequestError] = {}
    for i, request in enumerate(requests):
        try:
            adapted[i] = adapt_to_model(request, model, is_lenient=is_lenient)
        except InvalidRequestError as error:
            errors[i] = error
    if not adapted:
        return None, {}, errors
    positions = list(adapted)
    batch, invalid = join_valid(list(adapted.values()), model, view)
    for at, reason in invalid.items():
        del adapted[positions[at]]
        errors[positions[at]] = reason
    return batch, adapted, errors


class _Shape:
    """Layout of a batch, as far as it depends only on the sizes of its requests.

    Attributes:
        sizes: number of examples of each request.
        batch_size: sum of ``sizes``.
        last_bags: int64, position of the last bag of each request, in request order.
    """

    def __init__(self, sizes: tuple[int, ...], features: int) -> None:
        self.sizes = list(sizes)
        self.batch_size = sum(sizes)
        self.last_bags = (np.array(sizes) * features).cumsum() - 1
        self._features = features

    @cached_property
    def bag_order(self) -> np.ndarray:
        """Positions in request order of the bags of the feature-major batch, int64."""
        return feature_major_order(np.array(self.sizes), self._features)


_cached_shape = lru_cache(maxsize=512)(_Shape)


def _shape(sizes: tuple[int, ...], features: int) -> _Shape:
    """Returns the shape for ``sizes``, cached for small batches, as their sizes recur often."""
    bags = sum(sizes) * features
    return _cached_shape(sizes, features) if bags <= CACHED_BAGS_MAX else _Shape(sizes, features)


def _join_several(requests: Sequence[LookupRequest], features: int) -> Batch | None:
    """Returns ``requests`` as one feature-major batch; None if the lengths of one do not add up."""
    shape = _shape(tuple([request.batch_size for request in requests]), features)
    lengths = np.concatenate([request.lengths for request in requests])
    bag_ends = lengths.cumsum(dtype=np.int64)
    ends = list(accumulate([request.ids.size for request in requests]))
    if lengths.min() < 0 or bag_ends[shape.last_bags].tolist() != ends:
        return None
    order = bags_to_ids(lengths, shape.bag_order, bag_ends)
    weights = None
    if any(request.weights is not None for request in requests):
        weights = np.concatenate([_weights_or_ones(request) for request in requests])[order]
    return Batch(
        np.concatenate([request.ids for request in requests])[order],
        lengths[shape.bag_order],
        weights,
        shape.sizes,
        shape.batch_size,
    )


def _weights_or_ones(request: LookupRequest) -> np.ndarray:
    if request.weights is not None:
        return request.weights
    return np.ones(request.ids.size, np.float32)
