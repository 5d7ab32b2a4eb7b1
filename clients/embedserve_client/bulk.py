"""Bulk lookups for batch jobs: large inputs are split into requests, several of them in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_client.core.batch import Features, RequestBatch, Weights, batch_of
from embedserve_client.core.result import EmbedResult, OutputDType
from embedserve_client.errors import EmbedServeClientError, InvalidRequest
from embedserve_client.grpc.client import GrpcEmbedClient
from embedserve_client.rest.client import EmbedClient

EXAMPLES, IN_FLIGHT = 1024, 4
"""Defaults of ``embed_in_batches``."""


def embed_in_batches(
    client: EmbedClient | GrpcEmbedClient,
    features: Features,
    *,
    weights: Weights | None = None,
    model: str | None = None,
    output_dtype: OutputDType = "float32",
    output_keys: Sequence[str] = (),
    examples: int = EXAMPLES,
    in_flight: int = IN_FLIGHT,
    progress: bool = False,
) -> Iterator[EmbedResult]:
    """Yields the results of large inputs in order, one result per ``examples`` examples.

    All features must fit in memory. Up to ``in_flight`` threads send requests concurrently.

    Args:
        client: client that sends the requests; its timeout and retries apply to each request. Set
            some retries. A REST client uses several connections, a gRPC client uses one.
        features, weights, model, output_dtype, output_keys: arguments of `EmbedClient.embed`.
        examples: examples per request; the last request has the rest.
        in_flight: requests that are pending, or whose results are not consumed yet.
        progress: whether to show a progress bar on standard error. There is none unless tqdm is
            installed.

    Raises:
        EmbedServeClientError: the first request that failed. A note names its range of examples,
            and indices in ``field`` count from the start of that range. Requests not sent by then
            are dropped.
    """
    for name, value in (("examples", examples), ("in_flight", in_flight)):
        if value < 1:
            raise InvalidRequest(f"{name}: {value} is not 1 or more", field=name)
    batch = batch_of(features, weights)
    starts = range(0, batch.batch_size, examples)
    slicer = _Slicer(batch)

    def send(start: int) -> EmbedResult:
        stop = min(start + examples, batch.batch_size)
        some, their_weights = slicer.take(start, stop)
        try:
            return client.embed(
                some,
                weights=their_weights,
                model=model,
                output_dtype=output_dtype,
                output_keys=output_keys,
            )
        except EmbedServeClientError as error:
            error.add_note(f"of the examples {start} to {stop - 1}, counted from 0")
            raise

    return _in_order(send, starts, in_flight, batch.batch_size if progress else None)


def _in_order(
    send: Callable[[int], EmbedResult], starts: range, in_flight: int, total: int | None
) -> Iterator[EmbedResult]:
    waiting: deque[Future[EmbedResult]] = deque()
    with ThreadPoolExecutor(in_flight, thread_name_prefix="embed") as pool, _bar(total) as bar:
        try:
            for start in starts:
                if len(waiting) == in_flight:
                    yield _take_result(waiting, bar)
                waiting.append(pool.submit(send, start))
            while waiting:
                yield _take_result(waiting, bar)
        finally:
            for one in waiting:
                one.cancel()


def _take_result(waiting: deque[Future[EmbedResult]], bar: Any) -> EmbedResult:
    result = waiting.popleft().result()
    if bar is not None:
        bar.update(result.batch_size)
    return result


class _Slicer:
    """Slices a batch by examples."""

    def __init__(self, batch: RequestBatch) -> None:
        self._lengths = batch.lengths.reshape(len(batch.keys), batch.batch_size)
        self._keys = batch.keys
        self._weights = batch.weights
        self._values: dict[str, NDArray[Any]] = {}
        sizes = self._lengths.sum(axis=1, dtype=np.int64).tolist()
        strings, strings_at, ids_at = np.array(batch.string_ids, object), 0, 0
        for key, size in zip(batch.keys, sizes, strict=True):
            if key in batch.string_keys:
                self._values[key] = strings[strings_at : strings_at + size]
                strings_at += size
            else:
                self._values[key] = batch.ids[ids_at : ids_at + size]
                ids_at += size
        self._begins = np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
        ends = np.cumsum(self._lengths, axis=1, dtype=np.int64)
        self._offsets = np.concatenate([np.zeros((len(sizes), 1), np.int64), ends], axis=1)

    def take(self, start: int, stop: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Returns (features, weights) of the examples [start, stop), as pairs of values and
        lengths."""
        features, weights = {}, {}
        for at, key in enumerate(self._keys):
            first, last = self._offsets[at, start], self._offsets[at, stop]
            lengths = self._lengths[at, start:stop]
            features[key] = (self._values[key][first:last], lengths)
            if self._weights is not None:
                begin = self._begins[at]
                weights[key] = (self._weights[begin + first : begin + last], lengths)
        return features, weights if self._weights is not None else None


def _bar(total: int | None) -> AbstractContextManager[Any]:
    """Returns a progress bar; a context without one if ``total`` is None or tqdm is missing."""
    if total is None:
        return nullcontext()
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return nullcontext()
    bar: AbstractContextManager[Any] = tqdm(total=total, unit=" examples", unit_scale=True)
    return bar
