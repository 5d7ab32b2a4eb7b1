"""Shadow traffic: looks a share of a version's batches up in another version and compares.

The comparison is off the response path: it runs in a thread after the batch is answered. It handles
one batch at a time, and batches that arrive meanwhile are not compared. Its outcome never reaches a
client. The thread has normal priority. A thread of lower priority would be preempted on a busy core
while it holds the interpreter's lock, and the event loop would wait tens of milliseconds for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import random

import numpy as np

from embedserve.batching.join import adapt_and_join, begin_view
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.batching.split import in_request_order, per_key
from embedserve.deltas.rows_reader import end_view
from embedserve.lookup_types import LookupRequest
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.metrics.shadow_metrics import KEY_SUMS, Differences, ShadowMetrics
from embedserve.model_info import ModelInfo

logger = logging.getLogger(__name__)

TINY = 1e-30
"""Squared norm below which a vector counts as zero.

A pair of zero vectors has distance 0; a zero and a non-zero vector have distance 1."""


class ShadowExecutor:
    """Runs comparisons one after another in one thread, which it starts for the first of them."""

    def __init__(self) -> None:
        self._executor = _one_thread()

    def submit(self, comparison: Callable[[], None]) -> None:
        """Raises RuntimeError if no thread can be started."""
        try:
            self._executor.submit(comparison)
        except RuntimeError:
            self._executor = _one_thread()  # the former one keeps the comparison, and its batch
            raise


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "shadow")


class Shadow:
    """Compares the results of a version with those of ``engine``, which serves another version."""

    def __init__(
        self,
        engine: LookupEngine,
        model: ModelInfo,
        percent: float,
        metrics: ShadowMetrics,
        executor: ShadowExecutor,
    ) -> None:
        """
        Args:
            model: model of ``engine``.
            percent: percentage of the batches that are compared.
            executor: executor shared by all shadows of a process.
        """
        self._engine = engine
        self._model = model
        self._share = percent / 100
        self._metrics = metrics
        self._executor = executor
        self._log = RateLimitedLogger(logger)
        self._is_busy = False

    def offer(
        self,
        requests: Sequence[LookupRequest],
        value_chunks: Sequence[np.ndarray],
        unknown_counts: np.ndarray | None,
        served: ModelInfo,
    ) -> None:
        """Compares a sampled batch in the background; skips it if a comparison is running.

        Args:
            requests: requests in the feature order of the version ``served``.
            value_chunks: their values in request order, which are no longer written to.
            unknown_counts: numbers of ids without a row, int64 [requests, F]; None without any.
        """
        if random() >= self._share:
            return
        if self._is_busy:
            self._metrics.count("skipped")
            return
        self._is_busy = True
        try:
            self._executor.submit(
                partial(self._compare, requests, value_chunks, unknown_counts, served)
            )
        except RuntimeError as error:
            self._is_busy = False
            self._log_failure(served, error)
            self._metrics.count("failed")

    def _compare(
        self,
        requests: Sequence[LookupRequest],
        value_chunks: Sequence[np.ndarray],
        unknown_counts: np.ndarray | None,
        served: ModelInfo,
    ) -> None:
        try:
            values = np.concatenate(value_chunks) if len(value_chunks) > 1 else value_chunks[0]
            differences = compare(
                requests, values, unknown_counts, served, self._engine, self._model
            )
            count = partial(self._metrics.add, differences)
        except Exception as error:
            count = partial(self._metrics.count, "failed")
            self._log_failure(served, error)
        self._is_busy = False
        count()  # last, so that a reader of the metric can expect the next batch to be compared

    def _log_failure(self, served: ModelInfo, error: Exception) -> None:
        kind = f"{self._model.served_as} cannot be compared with version {served.version}"
        self._log.log(logging.WARNING, kind, f"{type(error).__name__}: {error}")


def compare(
    requests: Sequence[LookupRequest],
    values: np.ndarray,
    unknown_counts: np.ndarray | None,
    served: ModelInfo,
    engine: LookupEngine,
    model: ModelInfo,
) -> Differences:
    """Returns the differences between the results of ``engine`` and of ``served``.

    Args:
        requests: requests in the feature order of ``served``.
        values: results of ``served`` in request order, float32: [B, sum(length_per_key)], or
            [n, dim] for an unpooled model.
        unknown_counts: numbers of ids without a row in ``served``, int64 [requests, F]; None
            without any.
        model: model of ``engine``.

    Raises:
        ValueError: the versions have no key in common, a key differs in width, or only one version
            pools. Also if the vectors of a key differ in shape.
    """
    keys = [key for key in model.keys if key in served.keys]
    if not keys or model.is_pooled != served.is_pooled:
        raise ValueError("the two have no keys in common, or only one of them pools")
    widths = dict(zip(served.keys, served.length_per_key, strict=True))
    for key, width in zip(model.keys, model.length_per_key, strict=True):
        if widths.get(key, width) != width:
            raise ValueError(
                f"key {key!r} has {width} columns, and {widths[key]} in the version that answers: "
                "only versions of one layout are compared"
            )
    view = begin_view(engine.rows_reader)
    try:
        batch, requested, _ = adapt_and_join(requests, model, view, is_lenient=True)
        if batch is not None:
            ours = engine.lookup(batch.resolve_rows(), batch.lengths, batch.weights)
    finally:
        end_view(view)
    sums = np.zeros((len(KEY_SUMS), len(keys)))
    if batch is not None:
        ours = in_request_order(ours, batch, model)
        theirs = (
            values[_rows(requests, requested, served)] if len(requested) < len(requests) else values
        )
        their_requests = [requests[i] for i in requested]
        for i, key in enumerate(keys):
            sums[:, i] = _sums(
                _of_key(ours, list(requested.values()), model, key),
                _of_key(theirs, their_requests, served, key),
            )
    return Differences(
        keys=np.array([model.keys.index(key) for key in keys]),
        sums=sums,
        unknown_ids=_total(None if batch is None else batch.unknown_counts, model, model),
        served_unknown_ids=_total(unknown_counts, served, model),
        refused=len(requests) - len(requested),
    )


def _total(counts: np.ndarray | None, of: ModelInfo, model: ModelInfo) -> np.ndarray:
    """Returns sums over requests, int64 [F of ``model``], of counts [requests, F of ``of``]."""
    total = np.zeros(len(model.features), np.int64)
    if counts is not None:
        for count, feature in zip(counts.sum(axis=0).tolist(), of.features, strict=True):
            position = model.feature_positions.get(feature)
            if position is not None:
                total[position] = count
    return total


def _rows(requests: Sequence[LookupRequest], kept: Container[int], model: ModelInfo) -> np.ndarray:
    """Returns a mask, bool [rows], of the rows in request order of the requests at ``kept``."""
    sizes = [
        request.batch_size if model.is_pooled else int(per_key(request.lengths, model).sum())
        for request in requests
    ]
    return np.repeat([i in kept for i in range(len(requests))], sizes)


def _of_key(
    values: np.ndarray, requests: Sequence[LookupRequest], model: ModelInfo, key: str
) -> np.ndarray:
    """Returns the vectors of ``key``, float32 [n, dim], from values in request order."""
    place = model.keys.index(key)
    if model.is_pooled:
        start = sum(model.length_per_key[:place])
        columns: np.ndarray = values[:, start : start + model.length_per_key[place]]
        return columns
    counts = np.concatenate([per_key(request.lengths, model).sum(axis=1) for request in requests])
    is_of_key = np.tile(np.arange(len(model.keys)) == place, len(requests))
    rows: np.ndarray = values[np.repeat(is_of_key, counts)]
    return rows


def _sums(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float, float, float]:
    """Returns the sums that the shadow metrics accumulate for one key.

    They are (vectors, distances 1 - cos, squared differences, squares of ``theirs``, pairs of zero
    vectors). Pairs of zero vectors, as from empty bags, say nothing about agreement and are not
    counted among the vectors.

    Raises:
        ValueError: the shapes differ.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"vectors are {ours.shape}, those of the served version {theirs.shape}")
    both, squares, our_squares = (
        np.einsum("ij,ij->i", one, other, dtype=np.float64)
        for one, other in ((ours, theirs), (theirs, theirs), (ours, ours))
    )
    are_empty = (squares < TINY) & (our_squares < TINY)
    norms = np.maximum(np.sqrt(squares * our_squares), TINY)
    distances = np.where(are_empty, 0.0, 1 - both / norms)
    difference = ours - theirs
    squared = np.einsum("ij,ij->", difference, difference, dtype=np.float64)
    empty = int(are_empty.sum())
    return len(ours) - empty, float(distances.sum()), float(squared), float(squares.sum()), empty
