"""What a worker and the supervisor tell each other, each over its end of a channel."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum

MESSAGE_BYTES_MAX = 65536
REASON_CHARACTERS_MAX = 1000
_DIGITS = re.compile(r"[\d.,]+")


class WorkerMessage(Enum):
    """What travels over a worker's channel. The supervisor's end closes with the supervisor."""

    WARM = b"warm"
    """Worker: could serve, and waits for GO."""
    GO = b"go"
    READY = b"ready"
    """Worker: listens on both ports, and takes no connection yet."""
    ALONE = b"alone"
    """To a worker that is ready: nobody but workers listens any more, take connections."""
    ANNOUNCE = b"announce"
    """To one worker, when all are ready for the first time: tell the user."""
    LOOK = b"look"
    """To one worker: look at the store from now on, and say what it wants served (moves.py)."""
    RELOAD = b"reload"
    """To that worker: look now, whatever is followed. Worker: an operator asks for that."""


FAILED = b"failed "
"""Begins a worker's message of why it cannot serve."""


class Step(StrEnum):
    """What a message says of a version."""

    WANTED = "wanted"
    """Worker: the store says that it is to answer. Supervisor, to all: so it does."""
    FOUND = "found"
    """Worker: it is another one than answers, and lies at path."""
    PREPARE = "prepare"
    """Supervisor: load it from path, beside the one that answers."""
    PREPARED = "prepared"
    """Worker: it could answer."""
    SWITCH = "switch"
    """Supervisor: it answers from now on."""
    REFUSED = "refused"
    """Worker: it cannot be served, for a reason. Supervisor: it stays out."""
    UNOPENED = "unopened"
    """Worker: it cannot be opened, for a reason, and the next look tries it again. Supervisor, to
    all: so it is."""
    RETRY = "retry"
    """Worker: what was refused may be tried again. Supervisor, to all: so it may."""
    SHARE = "share"
    """Worker: the store says what the name answers of what names its model alone, and what it is
    compared in. Supervisor, to all: so it is."""
    LOAD = "load"
    """Worker: an operator wants it; as FOUND, also for a name that nothing answers for yet."""
    REMOVE = "remove"
    """Worker: an operator wants nothing to answer for the name. Supervisor, to all: so it is."""


@dataclass(frozen=True)
class Move:
    """A message between a worker and the supervisor.

    Attributes:
        name: that a version is served by: NAME, NAME@VERSION or NAME@ALIAS.
        attempt: of PREPARE, its number; of what follows from one, the same.
        share, shadow: in percent, of ``version`` once it answers; of any where that is 0.
    """

    step: Step
    name: str
    version: int = 0
    path: str = ""
    reason: str = ""
    attempt: int = 0
    share: float = 0.0
    shadow: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.version

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> Move:
        fields = json.loads(message)
        return cls(**fields | {"step": Step(fields["step"])})


def refused(name: str, version: int, reason: str, attempt: int = 0) -> Move:
    shown = reason[:REASON_CHARACTERS_MAX]
    return Move(Step.REFUSED, name, version, reason=shown, attempt=attempt)


def unopened(name: str, version: int, reason: str) -> Move:
    return Move(Step.UNOPENED, name, version, reason=reason[:REASON_CHARACTERS_MAX])


def is_news(reason: str, before: str) -> bool:
    """Whether ``reason`` differs from that ``before`` it in more than numbers, such as the bytes
    that are free: the log tells what is new alone."""
    return _DIGITS.sub("", reason) != _DIGITS.sub("", before)
