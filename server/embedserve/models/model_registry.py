"""Registry of the served model versions by name, each with its batcher.

The registry admits a decoded request: it chooses the version, and checks sizes and ``min_seq``. The
version's batcher checks features, and for a whole batch together ids and weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, Protocol

from embedserve.batching.batcher import Batcher
from embedserve.batching.pending_request import PendingRequest
from embedserve.batching.request_queue import RequestQueue
from embedserve.batching.shadow import ShadowExecutor
from embedserve.config import Limits
from embedserve.errors import (
    EmbedServeError,
    InvalidRequestError,
    NotReadyError,
    RequestTooLargeError,
    UnknownModelError,
    shortened,
)
from embedserve.lookup_types import LookupRequest
from embedserve.model_info import ModelInfo, PendingVersion, now_iso
from embedserve.model_names import split_name
from embedserve.models.traffic_split import TrafficSplit

logger = logging.getLogger(__name__)


QUICK_BYTES_MAX = 1 << 20
"""Maximum bytes of a body whose sizes are estimated when the check has to be quick.

The estimate for 1 MiB takes less than a millisecond."""


class RequestEstimator(Protocol):
    """Part of a Codec: functions that estimate a request body without decoding it.

    ``peek_model`` returns the model that the body names, "" if it names none. ``estimate_size``
    returns the approximate numbers of (bags, ids).
    """

    def peek_model(self, body: bytes) -> str: ...

    def estimate_size(self, body: bytes) -> tuple[int, int]: ...


class ModelRegistry:
    """Served versions by name, and whether the server accepts requests.

    A name has the format of --model: NAME, NAME@VERSION or NAME@ALIAS. A model may be served under
    several names. A request that names only the model goes to the first of them, or to a version
    that has a share of such requests.

    Attributes:
        default_model: model for requests that name none; "" if every request must name a model.
        has_full_queue: whether any queue of any model is full.
        has_full_unsized_queue: whether, for any model, the queue that a request of unknown size is
            checked against is full.
        not_ready: reason why the readiness probe fails, for example while draining; "" while the
            server is ready. Requests on open connections are still served.
        pending_versions: versions that are loading or failed to load, by the name that will serve
            them.
        draining: (name, version) of the versions that are draining their queues.
        since: activation time of the current version by name, in ISO 8601, UTC.
    """

    def __init__(self, default_model: str, limits: Limits) -> None:
        self._batchers: dict[str, Batcher] = {}
        self._traffic = TrafficSplit([], {})
        self._shares: dict[str, float] = {}
        self._shadows: dict[str, float] = {}
        self._shadow_executor = ShadowExecutor()
        self._only: Batcher | None = None
        self.default_model = default_model
        self.limits = limits
        self.has_full_queue = False
        self.has_full_unsized_queue = False
        self.not_ready = ""
        self.pending_versions: dict[str, PendingVersion] = {}
        self.draining: list[tuple[str, int]] = []
        self.since: dict[str, str] = {}
        self._damaged: dict[str, str] = {}
        self._on_batch_done: Callable[[], None] = lambda: None
        self._on_room: Callable[[], None] = lambda: None

    def activate(self, name: str, batcher: Batcher) -> Batcher | None:
        """Routes new requests for ``name`` to ``batcher``.

        Returns the previous batcher, or None. The previous batcher still serves its queued
        requests.
        """
        before = self._batchers.get(name)
        batcher.runner.on_batch_done = self._on_batch_done
        for queue in batcher.queues:
            queue.on_full, queue.on_room = self._update_flags, self._on_queue_reopened
        self._batchers[name] = batcher
        self.since[name] = now_iso()
        self.pending_versions.pop(name, None)
        self._changed(name)
        return before

    def remove(self, name: str) -> Batcher:
        """Stops serving ``name``; returns its batcher, which still serves its queued requests."""
        batcher = self._batchers.pop(name)
        del self.since[name]
        self._shares.pop(name, None)
        self._shadows.pop(name, None)
        self._changed(name)
        return batcher

    def _changed(self, name: str) -> None:
        self._damaged.pop(name, None)
        self._traffic = TrafficSplit(list(self._batchers.values()), self._shares)
        batchers = tuple(self._batchers.values())
        self._only = batchers[0] if len(batchers) == 1 else None
        self._assign_shadows()
        self._on_queue_reopened()

    def set_share(self, name: str, percent: float) -> None:
        """Sets the percentage of requests for ``name``'s model without a version that it serves."""
        if self._shares.get(name, 0.0) != percent:
            self._shares[name] = percent
            self._traffic = TrafficSplit(list(self._batchers.values()), self._shares)

    def models(self) -> list[ModelInfo]:
        return [batcher.model for batcher in self._batchers.values()]

    def model(self, name: str) -> ModelInfo:
        """Raises UnknownModelError if no model of that name is served."""
        return self._batcher(name).model

    def set_shadow(self, name: str, percent: float) -> None:
        """Makes the served ``name`` a shadow of the version that serves its model.

        ``percent`` of that version's batches are looked up in ``name`` as well and compared.
        """
        if self._shadows.get(name, 0.0) != percent:
            self._shadows[name] = percent
            self._assign_shadows()

    def _assign_shadows(self) -> None:
        """Assigns the shadows: at most one for each model, the first by name, so that all workers
        compare the same one."""
        for batcher in self._batchers.values():
            batcher.runner.shadow = None
        for name, percent in sorted(self._shadows.items()):
            candidate = self._batchers[name]
            served = self._traffic.by_name[candidate.model.name]
            if percent and candidate is not served and served.runner.shadow is None:
                served.runner.shadow = candidate.runner.shadow_of(
                    served.model, percent, self._shadow_executor
                )

    def status(self, model: ModelInfo) -> dict[str, Any]:
        """Returns the serving state of ``model``, an element of ``models()``, as JSON values."""
        name = model.served_as
        next_version = self.pending_versions.get(name)
        return {
            "alias": model.tag,
            "share": self._traffic.share_of(name),
            "shadow": self._shadows.get(name, 0.0),
            "since": self.since[name],
            "next": None if next_version is None else asdict(next_version),
            "leaving": [version for one, version in self.draining if one == name],
            "deltas": None if model.deltas is None else model.deltas.describe(),
            "shards": (
                None if model.shards is None else model.shards.describe(model.name, model.version)
            ),
            "local_tables": None if model.shards is None else list(model.local_tables),
        }

    def enqueue(self, request: LookupRequest, pending: PendingRequest) -> None:
        """Passes ``request`` to its model's batcher, which completes or rejects ``pending``.

        ``pending`` has its deadline already.

        Raises:
            EmbedServeError: the request is rejected immediately, and ``pending`` is not notified.
                An InvalidRequestError that only the batch reveals goes to ``pending`` instead.
        """
        traffic, name = self._traffic, request.model or self.default_model
        batcher = traffic.by_name.get(name)
        if batcher is None:
            batcher = self._batcher(request.model)  # resolves @VERSION, or else raises
        elif name in traffic.weighted:
            batcher = traffic.choose(name, pending.routing_key)
        model, limits = batcher.model, self.limits
        examples, ids = request.batch_size, request.ids.size
        response_bytes = (
            examples * model.response_bytes_per_example + ids * model.response_bytes_per_id
        )
        try:
            if (
                examples > limits.request_examples_max
                or ids > limits.request_ids_max
                or response_bytes > limits.request_output_bytes_max
            ):
                self._reject_size(request, model)
            if request.min_seq is not None:
                _check_seq(request.min_seq, model)
            batcher.enqueue(request, pending)
        except EmbedServeError as error:
            error.set_model(model)
            raise

    def check_queue_for_body(
        self, model: str, body: bytes, estimator: RequestEstimator, *, is_quick: bool = False
    ) -> None:
        """Raises OverloadedError while the queue that a request would wait in is full.

        May be called from any thread, before the request is decoded.

        Args:
            model: model in the URL; "" if the URL names none.
            estimator: called with ``body`` only where the result depends on it.
            is_quick: whether to skip the size estimate for bodies above QUICK_BYTES_MAX.
        """
        batchers = self._possible(model or self.default_model)
        if not model and self._only is None and (named := estimator.peek_model(body)):
            batchers = self._possible(named) or batchers
        if not batchers or not all(batcher.has_full_queue for batcher in batchers):
            return
        _check_room([batcher.unsized_queue for batcher in batchers])
        if not is_quick or len(body) <= QUICK_BYTES_MAX:
            bags, ids = estimator.estimate_size(body)
            _check_room([batcher.queue_for(bags, ids) for batcher in batchers])

    def check_unsized_queue(self, model: str) -> None:
        """Raises OverloadedError if the queues would reject any body; called before it arrives.

        A request that names no model in its URL is judged only if a single version is served: its
        body may name a model whose queue has room.
        """
        if batchers := self._possible(model):
            _check_room([batcher.unsized_queue for batcher in batchers])

    def _possible(self, name: str) -> Sequence[Batcher]:
        """Returns all batchers that may serve a request for ``name``, as far as is known before its
        body is read."""
        if self._only is not None:
            return (self._only,)
        return self._traffic.possible.get(name, ())

    def set_callbacks(self, on_batch_done: Callable[[], None], on_room: Callable[[], None]) -> None:
        """Registers callbacks, before the first version is activated.

        Args:
            on_batch_done: called once every request of a batch is completed or rejected.
            on_room: called when a queue accepts requests again.
        """
        self._on_batch_done, self._on_room = on_batch_done, on_room

    def _update_flags(self) -> None:
        """Sets has_full_queue and has_full_unsized_queue."""
        batchers = self._batchers.values()
        self.has_full_queue = any(batcher.has_full_queue for batcher in batchers)
        self.has_full_unsized_queue = any(batcher.unsized_queue.is_full for batcher in batchers)

    def _on_queue_reopened(self) -> None:
        self._update_flags()
        self._on_room()

    @property
    def is_ready(self) -> bool:
        return not (self.not_ready or self._damaged)

    async def check_integrity(self) -> None:
        """Compares the rows of every model with their state at the start.

        If they have changed, the server is not ready until another version is activated under that
        name.
        """
        for name, batcher in tuple(self._batchers.items()):
            if self._batchers.get(name) is not batcher:  # retired during the checks of the others
                continue
            damage = await batcher.runner.find_damage()
            if damage and name not in self._damaged and self._batchers.get(name) is batcher:
                logger.error("not ready any more: %s", damage)
                self._damaged[name] = damage
                batcher.note_damage()

    def check_ready(self) -> None:
        """Raises NotReadyError if the server is not ready, with the reason."""
        for reason in (self.not_ready, *self._damaged.values()):
            if reason:
                raise NotReadyError(reason)

    def check_loaded(self) -> None:
        """Raises NotReadyError while no model is loaded."""
        if self.not_ready and not self._batchers:
            raise NotReadyError(self.not_ready)

    def _batcher(self, name: str) -> Batcher:
        """Returns the batcher for a name that a request may use.

        Raises:
            NotReadyError: no model is loaded yet.
            UnknownModelError: nothing is served by that name.
        """
        if name.startswith("@"):  # a version or alias of the default model
            name = (split_name(self.default_model)[0] + name) if self.default_model else ""
        batcher = self._traffic.by_name.get(name or self.default_model)
        if batcher is not None:
            return batcher
        self.check_loaded()
        served = ", ".join(self._batchers)
        if not name:
            why = "there is no default (serve --default-model)"
            if self.default_model:  # an administrator has unloaded it
                why = f"the default model {self.default_model!r} is not served"
            raise UnknownModelError(
                f"the request names no model and {why}: this server has {served}", "model"
            )
        model, version = split_name(name)
        if version and (there := self._traffic.possible.get(model)):
            versions = ", ".join(map(_shown, there))
            shown = version if version.isdecimal() else repr(version)
            raise UnknownModelError(
                f"version is {shown}: the versions of {model} are {versions}", "version"
            )
        raise UnknownModelError(f"model is {shortened(name)!r}: this server has {served}", "model")

    def _reject_size(self, request: LookupRequest, model: ModelInfo) -> NoReturn:
        limits, examples, ids = self.limits, request.batch_size, request.ids.size
        if examples > limits.request_examples_max:
            limit, size = "request_examples_max", f"features: the batch has {examples} examples, "
        elif ids > limits.request_ids_max:
            limit, size = "request_ids_max", f"features: the batch has {ids} ids, "
        else:
            sizes = f"{examples} examples has" if model.is_pooled else f"{ids} ids has up to"
            nbytes = request.response_bytes(model)
            limit = "request_output_bytes_max"
            size = f"features: the answer to {sizes} {nbytes} bytes, "
        raise RequestTooLargeError(size + limits.describe(limit), "features")


def _check_room(queues: Sequence[RequestQueue]) -> None:
    """Raises OverloadedError if all ``queues`` are full."""
    if all(queue.is_full for queue in queues):
        queues[0].check_not_full()


def _shown(batcher: Batcher) -> str:
    tag, number = batcher.model.tag, batcher.model.version
    return str(number) if tag in ("", str(number)) else f"{number} ({tag})"


def _check_seq(min_seq: int, model: ModelInfo) -> None:
    """Raises NotReadyError while the rows of ``model`` are older than ``min_seq``, and
    InvalidRequestError if they never change."""
    if model.deltas is None:
        raise InvalidRequestError(
            f"min_seq is {min_seq}, but model {model.name!r} follows no deltas", "min_seq"
        )
    if (seq := model.deltas.live.seq) < min_seq:
        raise NotReadyError(
            f"min_seq is {min_seq}, the rows of model {model.name!r} are at seq {seq}", "min_seq"
        )
