"""What a worker and the supervisor tell each other, each over its end of a channel."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum

MESSAGE_BYTES_MAX = 65536
REASON_CHARACTERS_MAX = 1000


class WorkerMessage(Enum):
    """What travels over a worker's channel. The supervisor's end closes with the supervisor."""

    WARM = b"warm"
    """Worker: could serve, and waits for GO."""
    GO = b"go"
    READY = b"ready"
    """Worker: listens on both ports."""
    ANNOUNCE = b"announce"
    """To one worker, when all are ready for the first time: tell the user."""
    LOOK = b"look"
    """To one worker: look at the store from now on, and say what it wants served (moves.py)."""


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


@dataclass(frozen=True)
class Move:
    """A message between a worker and the supervisor."""

    step: Step
    model: str
    version: int
    path: str = ""
    reason: str = ""
    attempt: int = 0
    """Of PREPARE, its number; of what follows from one, the same."""

    @property
    def key(self) -> tuple[str, int]:
        return self.model, self.version

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> Move:
        fields = json.loads(message)
        return cls(**fields | {"step": Step(fields["step"])})


def refused(model: str, version: int, reason: str, attempt: int = 0) -> Move:
    shown = reason[:REASON_CHARACTERS_MAX]
    return Move(Step.REFUSED, model, version, reason=shown, attempt=attempt)
