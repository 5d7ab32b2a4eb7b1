"""Runs lookups through shared memory, and falls back to the connection.

A response through shared memory names the version that wrote the vectors, but not the columns of
each key. The client learns these from a response over the connection. It uses the connection for a
new version and after a rejection, so that errors are the same as for other lookups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from embedserve_client.core.result import EmbedResult
from embedserve_client.core.retries import RetryState
from embedserve_client.core.retry_loop import Send
from embedserve_client.errors import Overloaded
from embedserve_client.shm.protocol import (
    OUTPUTS_MAX,
    Answer,
    Lookup,
    OutputLayout,
    SharedMemoryCalls,
    SharedMemoryRejected,
    output_slices,
    write_inputs,
)
from embedserve_client.shm.regions import Region, Regions

SHARED_BYTES_MAX = 128 << 20
"""Bytes of ids and vectors that use shared memory, at most. No server accepts or returns more by
its defaults. Larger lookups use the connection, which reports the reason."""
CACHED_MODELS_MAX = 256
"""Models, by requested name, whose layouts are cached. Beyond this number the cache is cleared."""
VERSIONS_MAX = 8
"""Versions per model whose layouts are cached."""


@dataclass(frozen=True)
class _CachedModel:
    """Layouts of a model, learned from responses over the connection.

    Attributes:
        name: actual name of the model, also if the request used the default model.
        layouts: layout of each known version, by version.
        since: turn (logical time) of the request that taught them. A region that was registered
            earlier and is still known belongs to the same server, and so do these layouts.
    """

    name: str
    layouts: dict[int, OutputLayout]
    since: int

    def largest_layout(self, lookup: Lookup) -> OutputLayout:
        """Returns the layout that needs the most room, because any version may respond."""
        return max(self.layouts.values(), key=lookup.nbytes)


class SharedMemory:
    """Shared-memory state of one client; safe to use from any thread."""

    def __init__(self, prefix: str, calls: SharedMemoryCalls) -> None:
        """Creates the state without any files; raises ValueError for an invalid prefix.

        Args:
            prefix: value of the server's --shared-memory.
        """
        self._calls = calls
        self._regions = Regions(prefix)
        self._turns = count(1)
        self._registered = 0
        self._cached: dict[str | None, _CachedModel] = {}

    def close(self) -> None:
        """Removes the client's files; the server forgets them within a second."""
        self._regions.close()

    async def look_up(self, lookup: Lookup, send: Send, timeout_s: float | None) -> EmbedResult:
        """Makes one attempt at a lookup.

        The first attempt of a client registers a region. A server without shared memory thus raises
        InvalidRequest.
        """
        left_s = RetryState(0, timeout_s).left_s
        cached = self._cached.get(lookup.model)
        region = await self._region(self._room(lookup, cached), send, left_s)
        if region is not None and cached is not None and cached.since > region.since:
            result = await self._through(region, cached, lookup, send, left_s)
            if result is not None:
                return result
        elif region is not None:
            self._regions.give_back(region)
        turn = next(self._turns)
        answer: EmbedResult = await send(lookup.over_the_connection(left_s()))
        self._learn(lookup.model, answer, turn)
        return answer

    def _room(self, lookup: Lookup, cached: _CachedModel | None) -> int:
        """Returns the bytes of the region that the lookup needs; 0 if it uses the connection."""
        if cached is None:
            return 1  # any region; it is registered only
        output_layout = cached.largest_layout(lookup)
        if not output_layout.is_pooled and len(output_layout.layout.keys) > OUTPUTS_MAX:
            return 0
        nbytes = lookup.nbytes(output_layout)
        return nbytes if self._calls.bytes_min <= nbytes <= SHARED_BYTES_MAX else 0

    async def _region(
        self, nbytes: int, send: Send, left_s: Callable[[], float | None]
    ) -> Region | None:
        """Returns a region that the server knows; None if none is needed or there is no room."""
        region = self._regions.take(nbytes) if nbytes else None
        if region is None or region.since:
            return region
        try:
            await send(self._calls.register(region, left_s()))
        except BaseException as error:
            self._regions.drop(region)
            if isinstance(error, SharedMemoryRejected):
                return None
            raise
        region.since = self._registered = next(self._turns)
        return region

    async def _through(
        self,
        region: Region,
        cached: _CachedModel,
        lookup: Lookup,
        send: Send,
        left_s: Callable[[], float | None],
    ) -> EmbedResult | None:
        """Looks up through ``region``; returns None if the lookup must use the connection."""
        batch = lookup.batch
        model = cached.name if lookup.model is None else lookup.model
        try:
            inputs = write_inputs(batch, region)
            outputs = output_slices(cached.largest_layout(lookup).outputs(batch), lookup)
            call = self._calls.infer(region, inputs, outputs, lookup, model, left_s())
            answer: Answer = await send(call)
        except Overloaded:  # the server wrote nothing and will not
            self._regions.give_back(region)
            raise
        except BaseException as error:
            self._regions.drop(region)
            if isinstance(error, SharedMemoryRejected):
                return None
            raise
        output_layout = cached.layouts.get(answer.version)
        if output_layout is None or (answer.outputs, answer.dtype) != (
            output_layout.outputs(batch),
            lookup.dtype,
        ):
            self._regions.give_back(region)
            return None
        values = self._regions.lend(
            region, lookup.vectors_offset, output_layout.shape(batch), answer.dtype
        )
        lengths = None if output_layout.is_pooled else output_layout.lengths(batch)
        return EmbedResult(
            values,
            output_layout.layout,
            answer.model,
            answer.version,
            answer.unknown_ids,
            lengths,
            answer.seq,
            answer.missing_ids,
        )

    def _learn(self, model: str | None, answer: EmbedResult, turn: int) -> None:
        cached = self._cached.get(model)
        if cached is not None and cached.since > turn:
            return  # a later request has set it
        layouts: dict[int, OutputLayout] = {}
        if cached is not None and cached.name == answer.model and cached.since > self._registered:
            layouts = {**cached.layouts}
        layouts.pop(answer.version, None)
        layouts[answer.version] = OutputLayout(answer.layout, answer.is_pooled)
        if len(layouts) > VERSIONS_MAX:
            del layouts[next(iter(layouts))]
        if len(self._cached) >= CACHED_MODELS_MAX:
            self._cached.clear()
        self._cached[model] = _CachedModel(answer.model, layouts, turn)
