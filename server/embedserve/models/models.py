"""The service: the only door to the engines. Every frontend calls it.

Admits a request (ready? model, features, limits, room in the queue) and hands it to its
model's batcher, which checks ids and weights for a whole batch at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import perf_counter

from embedserve.batching.batcher import Batcher
from embedserve.batching.caller import Caller
from embedserve.batching.join import to_model_order
from embedserve.config import Limits
from embedserve.errors import (
    DRAINING,
    DeadlineExceededError,
    NotReadyError,
    RequestTooLargeError,
    UnknownModelError,
)
from embedserve.metrics.metrics import Metrics
from embedserve.types import LookupRequest, LookupResult, ModelInfo


class Service:
    """Served models by name, and whether requests are taken.

    Attributes:
        default_model: answers requests that name none; "" if they must name one.
        is_ready: False while draining: requests still come in over open connections and are
            answered, but load balancers are told to send no more.
    """

    def __init__(
        self,
        batchers: Mapping[str, Batcher],
        default_model: str,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._batchers = dict(batchers)
        self._only = next(iter(self._batchers.values())) if len(self._batchers) == 1 else None
        self.default_model = default_model
        self.limits = limits
        self.metrics = metrics
        self.is_ready = True

    def models(self) -> list[ModelInfo]:
        return [batcher.model for batcher in self._batchers.values()]

    def model(self, name: str) -> ModelInfo:
        """Raises UnknownModelError if no model of that name is served."""
        return self._batcher(name).model

    def answer_bytes(self, request: LookupRequest) -> int:
        """Bytes of the float32 values that ``request`` asks for; of an unpooled model the most.

        Raises:
            UnknownModelError: no model of its name is served.
        """
        return self._batcher(request.model).model.answer_bytes(request)

    def submit(
        self, request: LookupRequest, timeout_s: float | None = None
    ) -> asyncio.Future[LookupResult]:
        """The future answer to ``request``, which is wanted for ``timeout_s`` seconds from now.

        Cancelling the future takes the request out before it costs a lookup.

        Raises:
            EmbedServeError: the request is refused at once. An InvalidRequestError that shows
                only in the batch comes through the future.
        """
        batcher, request, deadline_s = self._admit(request, timeout_s)
        return batcher.submit(request, deadline_s)

    def enqueue(
        self, request: LookupRequest, caller: Caller, timeout_s: float | None = None
    ) -> None:
        """As submit, but ``caller`` is told the answer.

        Raises:
            EmbedServeError: the request is refused at once, and ``caller`` is told nothing.
        """
        batcher, request, deadline_s = self._admit(request, timeout_s)
        batcher.enqueue(request, caller, deadline_s)

    def check_open(self, model: str) -> None:
        """Raises OverloadedError while the queue of ``model`` is full, before anything is decoded.

        Does nothing where the model is not known from its name alone: a protobuf message may
        name it inside.
        """
        batcher = self._only or self._batchers.get(model)
        if batcher is not None:
            batcher.check_open()

    def _admit(
        self, request: LookupRequest, timeout_s: float | None
    ) -> tuple[Batcher, LookupRequest, float]:
        """Who looks ``request`` up, itself in the model's order, and its deadline."""
        batcher = self._batcher(request.model)
        self._check_size(request, batcher.model)
        request = to_model_order(request, batcher.model)
        if timeout_s is None:
            return batcher, request, float("inf")
        if timeout_s <= 0:
            raise DeadlineExceededError("the deadline had passed when the request came")
        return batcher, request, perf_counter() + timeout_s

    def _batcher(self, name: str) -> Batcher:
        batcher = self._batchers.get(name or self.default_model)
        if batcher is not None:
            return batcher
        served = ", ".join(self._batchers)
        if name:
            raise UnknownModelError(f"model is {name!r}: this server has {served}", "model")
        raise UnknownModelError(
            f"the request names no model and there is no default (serve --default-model): "
            f"this server has {served}",
            "model",
        )

    def _check_size(self, request: LookupRequest, model: ModelInfo) -> None:
        limits = self.limits
        if request.batch_size > limits.request_examples_max:
            raise RequestTooLargeError(
                f"features: the batch has {request.batch_size} examples, the limit is "
                f"{limits.request_examples_max}",
                "features",
            )
        answer_bytes = model.answer_bytes(request)
        if answer_bytes > limits.request_output_bytes_max:
            asked = (
                f"{request.batch_size} examples has"
                if model.is_pooled
                else f"{request.ids.size} ids has up to"
            )
            raise RequestTooLargeError(
                f"features: the answer to {asked} {answer_bytes} bytes, "
                f"the limit is {limits.request_output_bytes_max}",
                "features",
            )

    def check_ready(self) -> None:
        """Raises NotReadyError while draining."""
        if not self.is_ready:
            raise NotReadyError(DRAINING)
