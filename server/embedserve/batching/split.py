"""Splits the engine's result for a batch into one result for each of its requests.

A pooled result is a slice. Unpooled values arrive key by key for the whole batch, so one gather
first reorders their rows request by request. Pooled values are copied only for a request that
selects some of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from embedserve.batching.permutations import bags_to_ids, request_major_order
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import Batch, LookupRequest, LookupResult, OutputOptions
from embedserve.model_info import ModelInfo


def in_request_order(values: np.ndarray, batch: Batch, model: ModelInfo) -> np.ndarray:
    """Returns the engine's values for ``batch`` in request order.

    Args:
        values: float32, or float16 if all requests of the batch want it. For a pooled model
            [B, sum(length_per_key)], already in request order. For an unpooled model [n, dim]: for
            each key the ids of its feature in batch order. Rows of skipped ids are zeroed in place.

    Returns:
        ``values``, or [n, dim]: for each request and key its ids in the order sent.
    """
    if model.is_pooled:
        return values
    if batch.skipped is not None:
        values[_rows_of(batch.skipped, batch, model)] = 0
    if len(batch.sizes) == 1:
        return values
    lengths = per_key(batch.lengths, model).reshape(-1)
    order = request_major_order(np.array(batch.sizes), len(model.keys))
    ordered: np.ndarray = values[bags_to_ids(lengths, order)]
    return ordered


def _rows_of(positions: np.ndarray, batch: Batch, model: ModelInfo) -> np.ndarray:
    """Returns an index of the rows in the engine's result for the ids at ``positions`` of the
    batch."""
    if model.keys_are_features:
        return positions
    mask = np.zeros(batch.ids.size, bool)
    mask[positions] = True
    bags = np.arange(batch.lengths.size).reshape(len(model.features), -1)
    rows: np.ndarray = mask[bags_to_ids(batch.lengths, bags[model.feature_per_key].reshape(-1))]
    return rows


def per_key(lengths: np.ndarray, model: ModelInfo) -> np.ndarray:
    """Returns the lengths per key, int32 [keys, B], from the lengths per feature [F * B]."""
    per_feature = lengths.reshape(len(model.features), -1)
    return per_feature if model.keys_are_features else per_feature[model.feature_per_key]


def is_split_quick(requests: Sequence[LookupRequest], model: ModelInfo) -> bool:
    """Returns whether the result of each of ``requests`` is a slice of the batch's."""
    return model.is_pooled and all(
        request.output is None and request.output_dtype == "float32" for request in requests
    )


def split(
    value_chunks: Sequence[np.ndarray],
    batch: Batch,
    requests: Sequence[LookupRequest],
    model: ModelInfo,
) -> list[LookupResult]:
    """Returns the results of ``requests``, with the keys that each requests, from their values in
    request order.

    Args:
        value_chunks: the engine's values; several arrays where a pooled batch was split by
            examples.
    """
    results: list[LookupResult] = []
    if not model.is_pooled:
        results = _split_unpooled(value_chunks[0], requests, model)
    elif len(value_chunks) > 1:
        results = _split_chunks(value_chunks, requests, model)
    else:
        start, values = 0, value_chunks[0]
        for size in batch.sizes:
            results.append(LookupResult(model, values[start : start + size]))
            start += size
    if batch.view is not None:
        for result in results:
            result.seq = batch.view.seq
    if batch.unknown_counts is not None:
        for result, counts in zip(results, batch.unknown_counts.tolist(), strict=True):
            result.unknown_ids = _by_feature(counts, model)
    if batch.missing_counts is not None:
        for result, counts in zip(results, batch.missing_counts.tolist(), strict=True):
            result.missing_ids = _by_feature(counts, model)
    for request, result in zip(requests, results, strict=True):
        if request.output is not None:
            select_output_keys(result, request.output)
    return results


def _by_feature(counts: Sequence[int], model: ModelInfo) -> dict[str, int] | None:
    """Returns the ``counts`` that are not 0, by feature; None if all are."""
    named = zip(model.features, counts, strict=True)
    return {feature: count for feature, count in named if count} or None


def errors_by_request(batch: Batch) -> dict[int, EmbedServeError]:
    """Returns the first of the batch's ``failures`` that concerns each request, by its index."""
    ends = np.cumsum(batch.sizes)
    errors: dict[int, EmbedServeError] = {}
    for examples, error in batch.failures:
        for request in np.unique(np.searchsorted(ends, examples, side="right")).tolist():
            errors.setdefault(request, error)
    return errors


def copy_if_view(values: np.ndarray) -> np.ndarray:
    """Returns ``values``, or a copy if they are a slice that would keep its batch alive."""
    base = values.base
    return values.copy() if isinstance(base, np.ndarray) and base.nbytes > values.nbytes else values


def select_output_keys(result: LookupResult, output: OutputOptions) -> None:
    """Reduces ``result`` to the keys of ``output``, which must exist in its model.

    The values of the selected keys are copied.
    """
    whole, keys = result.model, output.keys
    result.output = output
    if not keys or output.has_all or len(keys) == len(whole.keys):
        return
    selection = result.model = whole.with_keys(keys)
    if result.lengths is None:
        result.values = _columns(result.values, selection)
        result.extra_chunks = [_columns(chunk, selection) for chunk in result.extra_chunks]
        return
    ends = result.lengths.sum(axis=1, dtype=np.int64).cumsum()
    rows = np.split(result.values, ends[:-1])
    selected = list(selection.selected or ())
    result.values = np.concatenate([rows[at] for at in selected])
    result.lengths = result.lengths[selected]


def _columns(values: np.ndarray, selection: ModelInfo) -> np.ndarray:
    return np.concatenate([values[:, columns] for columns in selection.columns], axis=1)


def _split_chunks(
    value_chunks: Sequence[np.ndarray], requests: Sequence[LookupRequest], model: ModelInfo
) -> list[LookupResult]:
    results = []
    left = list(reversed(value_chunks))
    for request in requests:
        chunks = []
        missing = request.batch_size
        while missing:
            chunk = left.pop()
            chunks.append(chunk[:missing])
            if len(chunk) > missing:
                left.append(chunk[missing:])
            missing -= len(chunks[-1])
        results.append(LookupResult(model, chunks[0], extra_chunks=chunks[1:]))
    return results


def _split_unpooled(
    values: np.ndarray, requests: Sequence[LookupRequest], model: ModelInfo
) -> list[LookupResult]:
    results = []
    start = 0
    for request in requests:
        lengths = per_key(request.lengths, model)
        end = start + int(lengths.sum())
        results.append(LookupResult(model, values[start:end], None, lengths))
        start = end
    return results


def split_by_examples(batch: Batch, features: int, count: int) -> list[Batch]:
    """Splits the pooled ``batch`` by examples into up to ``count`` non-empty batches, in order."""
    count = min(count, batch.batch_size)
    if count <= 1:
        return [batch]
    lengths = batch.lengths.reshape(features, -1)
    bounds = np.linspace(0, batch.batch_size, count + 1).astype(np.int64)
    # [features, examples + 1]: for each feature the positions in the ids where its bags begin, and
    # where the last one ends.
    starts = np.zeros((features, batch.batch_size + 1), np.int64)
    lengths.cumsum(axis=1, out=starts[:, 1:])
    starts += lengths.sum(axis=1, dtype=np.int64).cumsum()[:, None] - starts[:, -1:]
    return [
        _sub_batch(batch, lengths[:, first:end], starts[:, first], starts[:, end])
        for first, end in pairwise(bounds.tolist())
    ]


def _sub_batch(batch: Batch, lengths: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Batch:
    """Returns the batch of the bags of ``lengths`` [features, examples].

    The ids of feature f run from starts[f] to ends[f].
    """
    slices = [slice(*one) for one in zip(starts.tolist(), ends.tolist(), strict=True)]
    weights = batch.weights
    return Batch(
        ids=np.concatenate([batch.ids[one] for one in slices]),
        # Copied: kernels of FBGEMM read the lengths of a single example, a column, as contiguous.
        lengths=lengths.flatten(),
        weights=None if weights is None else np.concatenate([weights[one] for one in slices]),
        sizes=[lengths.shape[1]],
        batch_size=lengths.shape[1],
    )
