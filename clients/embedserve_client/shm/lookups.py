"""Which lookups go through shared memory, and what is asked for them over the connection.

An answer by shared memory says which version wrote its vectors, and not which columns are whose:
that is told by answers over the connection, which is asked where a version is met first, and where
anything is refused, so that errors are those of other lookups.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from embedserve_client.core.result import EmbedResult
from embedserve_client.core.retries import RetryState
from embedserve_client.core.retry_loop import Operation, Steps, one_call
from embedserve_client.errors import Overloaded
from embedserve_client.shm.protocol import (
    OUTPUTS_MAX,
    Answer,
    Lookup,
    OutputLayout,
    PlacedCalls,
    SharedMemoryRejected,
    may_be_placed,
    put,
    wanted,
)
from embedserve_client.shm.regions import Region, Regions

PLACED_BYTES_MAX = 128 << 20
"""No server takes or answers more by its defaults; what it says of more, it says without."""
KNOWN_MAX = 256
"""Models, as they are asked for, of which is kept what answers told."""
VERSIONS_MAX = 8
"""Of a model."""


@dataclass(frozen=True)
class _Known:
    """What answers over the connection told of a model.

    Attributes:
        name: its own, also where it is asked for as the default one.
        forms: how its versions answer, by version.
        since: the turn in which they were asked for. A region that was registered before and is
            known now is the same server's, and so are these.
    """

    name: str
    forms: dict[int, OutputLayout]
    since: int

    def form(self, lookup: Lookup) -> OutputLayout:
        """The one that needs most room, as any may answer."""
        return max(self.forms.values(), key=lookup.nbytes)


class SharedMemory:
    """That of a client; used by any thread."""

    def __init__(self, prefix: str, calls: PlacedCalls) -> None:
        """prefix: what the server's --shared-memory says. ValueError where it can be none."""
        self._calls = calls
        self._regions = Regions(prefix)
        self._turns = count(1)
        self._registered = 0
        self._known: dict[str | None, _Known] = {}

    def close(self) -> None:
        """Removes its files; the server forgets them within a second."""
        self._regions.close()

    def steps(self, lookup: Lookup, timeout_s: float | None) -> Steps[EmbedResult]:
        """The calls of a try. The first of all registers a region, so that a server that has none
        says so: InvalidRequest."""
        left_s = RetryState(0, timeout_s).left_s
        known = self._known.get(lookup.model)
        region = yield from self._region(self._room(lookup, known), left_s)
        if region is not None and known is not None and known.since > region.since:
            result = yield from self._through(region, known, lookup, left_s)
            if result is not None:
                return result
        elif region is not None:
            self._regions.give(region)
        turn = next(self._turns)
        answer: EmbedResult = yield lookup.over_the_connection(left_s())
        self._learn(lookup.model, answer, turn)
        return answer

    def _room(self, lookup: Lookup, known: _Known | None) -> int:
        """Bytes of a region for it; 0 where it goes over the connection."""
        if known is None:
            return 1  # any
        form = known.form(lookup)
        if not form.is_pooled and len(form.layout.keys) > OUTPUTS_MAX:
            return 0
        nbytes = lookup.nbytes(form)
        return nbytes if self._calls.bytes_min <= nbytes <= PLACED_BYTES_MAX else 0

    def _region(
        self, nbytes: int, left_s: Callable[[], float | None]
    ) -> Generator[Any, Any, Region | None]:
        """One that the server knows; None where there is to be none, or is no room for one."""
        region = self._regions.take(nbytes) if nbytes else None
        if region is None or region.since:
            return region
        try:
            yield self._calls.register(region, left_s())
        except BaseException as error:
            self._regions.drop(region)
            if isinstance(error, SharedMemoryRejected):
                return None
            raise
        region.since = self._registered = next(self._turns)
        return region

    def _through(
        self, region: Region, known: _Known, lookup: Lookup, left_s: Callable[[], float | None]
    ) -> Generator[Any, Any, EmbedResult | None]:
        """The vectors, in ``region``; None where they are to be asked for without it."""
        batch = lookup.batch
        model = known.name if lookup.model is None else lookup.model
        try:
            inputs, outputs = put(batch, region), wanted(known.form(lookup).outputs(batch), lookup)
            call = self._calls.infer(region, inputs, outputs, lookup, model, left_s())
            answer: Answer = yield call
        except Overloaded:  # nothing was written, and nothing will be
            self._regions.give(region)
            raise
        except BaseException as error:
            self._regions.drop(region)
            if isinstance(error, SharedMemoryRejected):
                return None
            raise
        form = known.forms.get(answer.version)
        if form is None or (answer.outputs, answer.dtype) != (form.outputs(batch), lookup.dtype):
            self._regions.give(region)
            return None
        values = self._regions.lend(region, lookup.start, form.shape(batch), answer.dtype)
        lengths = None if form.is_pooled else form.lengths(batch)
        return EmbedResult(
            values, form.layout, answer.model, answer.version, answer.unknown_ids, lengths
        )

    def _learn(self, model: str | None, answer: EmbedResult, turn: int) -> None:
        known = self._known.get(model)
        if known is not None and known.since > turn:
            return  # another was asked later
        forms: dict[int, OutputLayout] = {}
        if known is not None and known.name == answer.model and known.since > self._registered:
            forms = {**known.forms}
        forms.pop(answer.version, None)
        forms[answer.version] = OutputLayout(answer.layout, answer.is_pooled)
        if len(forms) > VERSIONS_MAX:
            del forms[next(iter(forms))]
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[model] = _Known(answer.model, forms, turn)


def ask(
    shared: SharedMemory | None, lookup: Lookup, output_keys: object, timeout_s: float | None
) -> Operation[EmbedResult]:
    """The question of a lookup: through ``shared`` what may go that way."""
    if shared is None or not may_be_placed(lookup.batch, lookup.output_dtype, output_keys):
        return one_call(lookup.over_the_connection, timeout_s)
    return Operation(partial(shared.steps, lookup), timeout_s)
