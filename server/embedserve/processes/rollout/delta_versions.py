"""The supervisor's side of deltas: the versions that the server follows, served and next.

For a version that is prepared it makes the memory of changed rows, which the workers and the
applier open, and sends the applier which versions to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic

from embedserve.config import ServeSettings
from embedserve.deltas.delta_target import DeltaTarget, check_room, make_shared_state
from embedserve.deltas.status import SharedDeltaState
from embedserve.processes.open_store import open_folder
from embedserve.processes.rollout.served_name import RolloutVersion
from embedserve_store import ModelVersion
from embedserve_store.errors import NO_ACCESS
from embedserve_store.memory.available_memory import available_bytes

STALL_S_MAX = 30.0
"""Seconds for which no delta of a next version can be applied before its rollout fails. Its files
may be on their way, and an applier that ended starts again."""
HELD_REASON = "its deltas are held, and a move would change the rows: end the hold first"


class DeltaVersions:
    """Versions whose deltas a server follows, by served name; none without --deltas.

    Attributes:
        served: versions that workers start with.
        on_change: called when other versions are to be followed. Set by ApplierSupervision.
    """

    def __init__(self, settings: ServeSettings, served: dict[str, SharedDeltaState]) -> None:
        self.served = served
        self.on_change: Callable[[], None] = lambda: None
        self._settings = settings
        at_seqs = {(name, _number(one)): one.live.version.at_seq for name, one in served.items()}
        self._at_seqs = {key: seq for key, seq in at_seqs.items() if seq is not None}
        self._next: SharedDeltaState | None = None
        self._next_name = ""
        self._is_switching = False
        self._stalled_s: float | None = None

    def states(self) -> Iterator[SharedDeltaState]:
        """Yields what the processes share of each version."""
        yield from self.served.values()
        if self._next is not None:
            yield self._next

    def targets(self) -> dict[DeltaTarget, SharedDeltaState]:
        """Returns the versions that the applier is to follow."""
        found = {self._target_of(name, state): state for name, state in self.served.items()}
        if self._next is not None:
            version = self._target_of(self._next_name, self._next)
            found[replace(version, is_next=True, is_switching=self._is_switching)] = self._next
        return found

    def take(self) -> dict[DeltaTarget, SharedDeltaState]:
        """Returns ``targets``, and forgets it: in a forked process, so that its memory is given
        back once that process has no more use for it."""
        found = self.targets()
        self.served.clear()
        self._next = None
        return found

    def set_at_seq(self, name: str, number: int, at_seq: int | None) -> None:
        """Sets the last delta that a version may have, served as ``name`` or not yet; None: any.

        A version that has later ones goes back.
        """
        before = self._at_seqs.pop((name, number), None)
        if at_seq is not None:
            self._at_seqs[name, number] = at_seq
        if at_seq != before:
            self.on_change()

    def is_held(self, name: str) -> bool:
        """Returns whether an administrator holds the rows of the served version."""
        return name in self.served and self.served[name].hold.is_set

    def prepare(self, name: str, version: RolloutVersion) -> RolloutVersion:
        """Returns ``version`` with memory for its changed rows. Its line is followed from now on,
        until ``activate`` or ``drop_next``.

        Raises:
            StoreError: it cannot be opened, there is no memory for its changed rows, or these
                cannot change.
        """
        if self._settings.deltas == "none":
            return version
        opened = open_folder(version.path)
        check_room(self._settings, opened, available_bytes())
        made = make_shared_state(self._settings, opened, version.generation)
        self._next, self._next_name = made, name
        self._is_switching, self._stalled_s = False, None
        self.on_change()
        return replace(version, memory=made.live.memory.path)

    def request_switch(self) -> bool:
        """Returns whether the next version, which all workers have prepared, may serve: it has the
        deltas that the served version of its line has, and that is not held. True if it follows no
        deltas."""
        if self._next is None:
            return True
        if self.is_held(self._next_name):
            return False
        if not self._is_switching:
            self._is_switching = True
            self.on_change()
        return self._next.caught_up.is_set

    def why_stalled(self) -> str:
        """Returns why the next version does not get the deltas that it needs; "" while it may."""
        if self._next is None:
            return ""
        now = self._next.status.read()
        is_unknown = now.reason.startswith(NO_ACCESS) or self._next.caught_up.is_set
        if not now.is_stopped or is_unknown or self._is_current(self._next):
            self._stalled_s = None
            return ""
        self._stalled_s = self._stalled_s or monotonic()
        return now.reason if monotonic() - self._stalled_s > STALL_S_MAX else ""

    def _is_current(self, following: SharedDeltaState) -> bool:
        """Returns whether a version has all deltas of the served version of its line."""
        served = self.served.get(self._next_name)
        if served is None or served.live.start.line != following.live.start.line:
            return False
        return following.live.seq >= served.live.seq

    def activate(self, name: str) -> ModelVersion | None:
        """Makes the next version the served one of ``name``. Returns the version that workers start
        with from now on; None if it follows no deltas."""
        if self._next is None:
            return None
        if (former := self.served.get(name)) is not None:
            self._at_seqs.pop((name, _number(former)), None)
        state = self.served[name] = self._next
        self._next = None
        self.on_change()
        return state.live.version

    def drop_next(self) -> None:
        """Gives the memory of a version back that is not prepared any more."""
        if self._next is not None:
            self._next = None
            self.on_change()

    def remove(self, name: str) -> None:
        """Follows ``name`` no longer."""
        if self.served.pop(name, None) is not None:
            self._at_seqs = {key: seq for key, seq in self._at_seqs.items() if key[0] != name}
            self.on_change()

    def _target_of(self, name: str, state: SharedDeltaState) -> DeltaTarget:
        path, memory = str(state.live.version.path), state.live.memory
        at_seq = self._at_seqs.get((name, _number(state)))
        return DeltaTarget(name, path, memory.path, memory.generation, at_seq)


def _number(state: SharedDeltaState) -> int:
    return state.live.version.manifest.version
