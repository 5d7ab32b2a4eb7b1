"""What is served: models by name, each with the queue of its batcher.

Admits a decoded request (model, features, sizes) and hands it to its model's batcher, which
checks ids and weights for a whole batch at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol

from embedserve.batching.batcher import Batcher
from embedserve.batching.caller import Caller
from embedserve.batching.join import to_model_order
from embedserve.config import Limits
from embedserve.errors import NotReadyError, RequestTooLargeError, UnknownModelError
from embedserve.types import ComingVersion, LookupRequest, ModelInfo

logger = logging.getLogger(__name__)


QUICK_BYTES_MAX = 1 << 20
"""Of a body whose sizes are told in less than a millisecond."""


class Peek(Protocol):
    """Tells of a body without decoding it which model it names, "" for none, and how many (bags,
    ids) it has, about."""

    def model_of(self, body: bytes) -> str: ...

    def sizes_of(self, body: bytes) -> tuple[int, int]: ...


class ServedModels:
    """Served models by name, and whether requests are taken.

    Attributes:
        default_model: answers requests that name none; "" if they must name one.
        is_full: whether a queue of one of the models is full.
        is_closed: whether one of the models takes no request, be it small or large.
        not_ready: why load balancers are told to send no more, as while draining; "" while they
            may. What still comes in over open connections is answered.
        coming: versions that are being loaded or were refused, by the model that waits for them.
    """

    def __init__(self, batchers: Mapping[str, Batcher], default_model: str, limits: Limits) -> None:
        self._batchers = dict(batchers)
        self._only = next(iter(self._batchers.values())) if len(self._batchers) == 1 else None
        self.default_model = default_model
        self.limits = limits
        self.is_full = False
        self.is_closed = False
        self.not_ready = ""
        self.coming: dict[str, ComingVersion] = {}
        self._damaged: dict[str, str] = {}
        self._on_room: Callable[[], None] | None = None
        for batcher in self._batchers.values():
            batcher.on_full, batcher.on_room = self._look, self._has_room

    def switch(self, batcher: Batcher) -> Batcher:
        """Has ``batcher`` answer what comes for its model from now on; gives the one before, which
        answers what it holds."""
        name = batcher.model.name
        before = self._batchers[name]
        batcher.on_answered = before.on_answered
        batcher.on_full, batcher.on_room = self._look, self._has_room
        self._batchers[name] = batcher
        if self._only is not None:
            self._only = batcher
        self._damaged.pop(name, None)
        self.coming.pop(name, None)
        self._has_room()
        return before

    def models(self) -> list[ModelInfo]:
        return [batcher.model for batcher in self._batchers.values()]

    def model(self, name: str) -> ModelInfo:
        """Raises UnknownModelError if no model of that name is served."""
        return self._batcher(name).model

    def enqueue(self, request: LookupRequest, caller: Caller) -> None:
        """Hands ``request`` over; ``caller``, which has its deadline, is told the answer.

        Raises:
            EmbedServeError: the request is refused at once, and ``caller`` is told nothing. An
                InvalidRequestError that shows only in the batch is told to ``caller``.
        """
        batcher = self._batchers.get(request.model or self.default_model)
        if batcher is None:
            batcher = self._batcher(request.model)  # which says what there is
        model, limits = batcher.model, self.limits
        examples, ids = request.batch_size, request.ids.size
        answer_bytes = examples * model.answer_bytes_per_example + ids * model.answer_bytes_per_id
        if (
            examples > limits.request_examples_max
            or ids > limits.request_ids_max
            or answer_bytes > limits.request_output_bytes_max
        ):
            self._refuse_size(request, model)
        batcher.enqueue(to_model_order(request, model), caller)

    def check_open(self, model: str, body: bytes, peek: Peek, *, is_quick: bool = False) -> None:
        """Raises OverloadedError while the queue that a request would wait in is full.

        Asked before a request is decoded, of any thread.

        Args:
            model: as its URL says; "" where that says none.
            peek: asked of ``body`` only where that matters.
            is_quick: a body that takes long to look at is let in.
        """
        batcher = self._only or self._batchers.get(model or self.default_model)
        if not model and self._only is None and (named := peek.model_of(body)):
            batcher = self._batchers.get(named, batcher)
        if batcher is None or not batcher.is_full:
            return
        batcher.check_open()
        if not is_quick or len(body) <= QUICK_BYTES_MAX:
            batcher.check_open_for(*peek.sizes_of(body))

    def check_any_open(self, model: str) -> None:
        """As check_open, before there is a body: raises where no body could be let in."""
        batcher = self._only or self._batchers.get(model)
        if batcher is not None:
            batcher.check_open()

    def call_back(self, on_answered: Callable[[], None], on_room: Callable[[], None]) -> None:
        """Has it told when a batch's callers were told, and when a queue has room again."""
        self._on_room = on_room
        for batcher in self._batchers.values():
            batcher.on_answered = on_answered

    def _look(self) -> None:
        self.is_full = any(batcher.is_full for batcher in self._batchers.values())
        self.is_closed = any(batcher.is_closed for batcher in self._batchers.values())

    def _has_room(self) -> None:
        self._look()
        if self._on_room is not None:
            self._on_room()

    @property
    def is_ready(self) -> bool:
        return not (self.not_ready or self._damaged)

    async def look_for_damage(self) -> None:
        """Is not ready any more where a model's rows are not what they were at the start, until
        another version of it answers."""
        for name in tuple(self._batchers):
            batcher = self._batchers[name]
            damage = await batcher.find_damage()
            if damage and name not in self._damaged and self._batchers[name] is batcher:
                logger.error("not ready any more: %s", damage)
                self._damaged[name] = damage
                batcher.note_damage()

    def check_ready(self) -> None:
        """Raises NotReadyError where it is not."""
        for reason in (self.not_ready, *self._damaged.values()):
            if reason:
                raise NotReadyError(reason)

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

    def _refuse_size(self, request: LookupRequest, model: ModelInfo) -> NoReturn:
        limits = self.limits
        if request.batch_size > limits.request_examples_max:
            raise RequestTooLargeError(
                f"features: the batch has {request.batch_size} examples, "
                + limits.said("request_examples_max"),
                "features",
            )
        if request.ids.size > limits.request_ids_max:
            raise RequestTooLargeError(
                f"features: the batch has {request.ids.size} ids, "
                + limits.said("request_ids_max"),
                "features",
            )
        asked = (
            f"{request.batch_size} examples has"
            if model.is_pooled
            else f"{request.ids.size} ids has up to"
        )
        raise RequestTooLargeError(
            f"features: the answer to {asked} {model.answer_bytes(request)} bytes, "
            + limits.said("request_output_bytes_max"),
            "features",
        )
