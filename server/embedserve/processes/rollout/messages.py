"""States that the rollout coordinator and the serving processes exchange.

The coordinator sends what every process is to serve, as a whole: a newer `Desired` replaces an
older one, and a worker that starts needs only the last. Processes report what they serve, also as a
whole. Between a supervisor and its workers a message is a line of JSON (channel.py). A single
process passes the objects themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

REASON_CHARACTERS_MAX = 1000


class TargetPhase(StrEnum):
    """Whether a process loads a version next to the current one, or serves it."""

    PREPARE = "prepare"
    SERVE = "serve"


class LoadState(StrEnum):
    """How far a process has loaded the version of a target. IDLE: it has nothing to load."""

    LOADING = "loading"
    PREPARED = "prepared"
    IDLE = "idle"
    FAILED = "failed"


class Operation(StrEnum):
    """Operation that an administrator requests."""

    LOAD = "load"
    UNLOAD = "unload"
    RELOAD = "reload"


@dataclass(frozen=True)
class AliasSettings:
    """Settings of the alias by which a version is served.

    They apply once ``version`` serves; with version 0 to the version that serves now.

    Attributes:
        share: percentage of the requests that name only the model.
        shadow: percentage of the serving version's batches that are also looked up here, to compare
            the results.
        at_seq: last delta that ``version`` may have; None: any.
    """

    version: int
    share: float = 0.0
    shadow: float = 0.0
    at_seq: int | None = None


@dataclass(frozen=True)
class Failure:
    """Version that is not served, and why.

    Attributes:
        is_final: False if each poll of the store retries the version. A final failure is retried
            after a reload or a load, or once the store has named another version.
    """

    version: int
    reason: str
    is_final: bool


@dataclass(frozen=True)
class Target:
    """Desired state of one served name: NAME, NAME@VERSION or NAME@ALIAS.

    While a version is prepared the target names only that one. A process receives such a target
    only when it serves what the others serve, and keeps serving it.

    Attributes:
        version: version to prepare or to serve; 0 if no version can be served.
        path: folder of the version.
        generation: number of the rollout, larger than that of all before; a repeated attempt has a
            new one.
        store_version: version that the store points to; 0 if that is not known.
        memory: path of the memory of its changed rows; "" if it follows no deltas.
        queued: version that is prepared after the present rollout; 0 for none.
    """

    version: int
    path: str
    generation: int
    phase: TargetPhase
    store_version: int = 0
    failure: Failure | None = None
    alias_settings: AliasSettings | None = None
    memory: str = ""
    queued: int = 0


@dataclass(frozen=True)
class Desired:
    """Coordinator to process: what to serve, by served name. Other names are removed.

    Attributes:
        watches_store: whether this process watches the store for all.
        polls_requested: number of immediate polls that were requested of the process that watches.
        may_listen: whether a worker that starts may listen, because it serves what the others
            serve, or no other serves. A worker that listens ignores it.
        may_accept: whether this worker listens and the startup server has ended, so that it may
            accept connections.
        logs_ready: whether this process logs that the server is ready.
        command_handled: `AdminCommand.serial` of this process's last command that is handled: what
            ``names`` says comes after it. 0 for none.
    """

    names: Mapping[str, Target] = field(default_factory=dict)
    watches_store: bool = False
    polls_requested: int = 0
    may_listen: bool = False
    may_accept: bool = False
    logs_ready: bool = False
    command_handled: int = 0


@dataclass(frozen=True)
class NameStatus:
    """Status of one name in a process.

    Attributes:
        version: version that serves; 0 for none.
        generation: generation of the target that ``state`` refers to.
        reason: why the version of that target could not be loaded, in the state FAILED.
        is_final: False if a later attempt may load it, in the state FAILED.
        rows_generation: generation whose changed rows the version that serves reads; 0 for those
            that the server has started with, or none.
    """

    version: int
    generation: int = 0
    state: LoadState = LoadState.IDLE
    reason: str = ""
    is_final: bool = True
    rows_generation: int = 0

    def is_serving(self, target: Target) -> bool:
        """Returns whether the version of ``target`` serves, with the changed rows of its rollout:
        a version that serves again after another has new memory for them."""
        has_rows = not target.memory or self.rows_generation == target.generation
        return self.version == target.version and has_rows

    def is_loading(self, target: Target) -> bool:
        """Returns whether the version of ``target`` has yet to be loaded, or to fail."""
        has_ended = self.state is not LoadState.LOADING and self.generation == target.generation
        return target.version != 0 and not self.is_serving(target) and not has_ended


class WorkerStatus(msgspec.Struct, frozen=True, tag=True):
    """Process to coordinator: what it serves and loads, by served name. A worker sends the first
    one when its models are loaded, and runs once it receives a desired state."""

    names: Mapping[str, NameStatus] = {}


class StartReport(msgspec.Struct, frozen=True, tag=True):
    """Worker to supervisor: the end of its start.

    Attributes:
        reason: why it could not start; None: it listens, and accepts connections once it may.
    """

    reason: str | None = None


@dataclass(frozen=True)
class StoreEntry:
    """State of a name in the store.

    A new version is reported twice. First, when it is found, without ``path``: that cancels a
    rollout of another version, and starts ``embedserve_model_behind_seconds``. Then, when it has
    been opened, with ``path``: that queues its rollout; or with ``reason`` if it cannot be opened.

    Attributes:
        version: version that the name points to; 0 if its alias was removed.
        path: folder of that version, if it was opened because it is to be rolled out.
        reason: why it cannot be opened.
        is_final: False if the next poll retries it.
    """

    version: int
    alias_settings: AliasSettings = AliasSettings(0)
    path: str = ""
    reason: str = ""
    is_final: bool = False


class StoreReport(msgspec.Struct, frozen=True, tag=True):
    """Watching process to coordinator: what a poll of the store has found, by served name. A poll
    sends one report of all names, then one for each version that it has opened.

    Attributes:
        poll_completed: `Desired.polls_requested` of the request whose poll ends with this report;
            0 for none.
    """

    names: Mapping[str, StoreEntry]
    poll_completed: int = 0


class AdminCommand(msgspec.Struct, frozen=True, tag=True):
    """Process to coordinator: operation of an administrator. LOAD has a version, its folder, and
    the last delta that it may have.

    Attributes:
        serial: number of the command in its process, larger than that of all before.
    """

    operation: Operation
    name: str = ""
    version: int = 0
    path: str = ""
    at_seq: int | None = None
    serial: int = 0


Report = WorkerStatus | StoreReport | AdminCommand


def message_to_bytes(message: Desired | Report | StartReport) -> bytes:
    return msgspec.json.encode(message)


def desired_from_bytes(message: bytes) -> Desired:
    return msgspec.json.decode(message, type=Desired)


def report_from_bytes(message: bytes) -> Report | StartReport:
    report: Report | StartReport = msgspec.json.decode(message, type=Report | StartReport)
    return report
