"""What a worker and the supervisor tell each other, each over its end of a channel."""

from __future__ import annotations

import asyncio
import json
import re
import selectors
import socket
from collections import deque
from collections.abc import Callable
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
    START_ACCEPTING = b"alone"
    """To a worker that is ready: nobody but workers listens any more, take connections."""
    ANNOUNCE = b"announce"
    """To one worker, when all are ready for the first time: tell the user."""
    WATCH_STORE = b"look"
    """To one worker: look at the store from now on, and say what it wants served (moves.py)."""
    RELOAD = b"reload"
    """To that worker: look now, whatever is followed. Worker: an operator asks for that."""


FAILED = b"failed "
"""Begins a worker's message of why it cannot serve."""


class SupervisorChannel:
    """The supervisor's end of a worker's channel. The socket holds some 160 messages; what a worker
    has not read beyond that is queued, and sent in order once it reads."""

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, hear: Callable[[], None]
    ) -> None:
        """
        Args:
            selector: calls what is registered with the events that came.
            hear: called when there is a message.
        """
        sock.setblocking(False)
        self._sock = sock
        self._selector = selector
        self._hear = hear
        self._unsent: deque[bytes] = deque()
        selector.register(sock, selectors.EVENT_READ, self._on_events)

    def send(self, message: bytes) -> None:
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    def receive(self) -> bytes:
        return self._sock.recv(MESSAGE_BYTES_MAX)

    def end(self) -> None:
        """Closes the channel of a worker that ends."""
        self._selector.unregister(self._sock)
        self.close()

    def close(self) -> None:
        """Closes the socket alone: a forked process has its parent's selector."""
        self._sock.close()

    def _on_events(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ:
            self._hear()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._sock.send(self._unsent[0])
            except BlockingIOError:
                break
            except OSError:
                pass  # a worker that has ended is buried later
            self._unsent.popleft()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._sock, events, self._on_events)


class WorkerChannel:
    """The worker's end of its channel, for its event loop. The socket holds some 160 messages; what
    the supervisor has not read beyond that is queued, and sent in order once it reads."""

    def __init__(self, sock: socket.socket) -> None:
        """
        Args:
            sock: does not block.
        """
        self._sock = sock
        self._unsent: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            try:
                self._sock.send(self._unsent[0])
            except BlockingIOError:
                loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                pass  # the supervisor has ended, which whoever reads the socket sees
            self._unsent.popleft()
        loop.remove_writer(self._sock)


class RolloutStep(StrEnum):
    """What a message says of a version."""

    DESIRED = "wanted"
    """Worker: the store says that it is to answer. Supervisor, to all: so it does."""
    AVAILABLE = "found"
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
class RolloutMessage:
    """A message between a worker and the supervisor.

    Attributes:
        name: that a version is served by: NAME, NAME@VERSION or NAME@ALIAS.
        attempt: of PREPARE, its number; of what follows from one, the same.
        share, shadow: in percent, of ``version`` once it answers; of any where that is 0.
    """

    step: RolloutStep
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
    def from_bytes(cls, message: bytes) -> RolloutMessage:
        fields = json.loads(message)
        return cls(**fields | {"step": RolloutStep(fields["step"])})


def refused(name: str, version: int, reason: str, attempt: int = 0) -> RolloutMessage:
    shown = reason[:REASON_CHARACTERS_MAX]
    return RolloutMessage(RolloutStep.REFUSED, name, version, reason=shown, attempt=attempt)


def unopened(name: str, version: int, reason: str) -> RolloutMessage:
    return RolloutMessage(
        RolloutStep.UNOPENED, name, version, reason=reason[:REASON_CHARACTERS_MAX]
    )


def is_news(reason: str, before: str) -> bool:
    """Whether ``reason`` differs from that ``before`` it in more than numbers, such as the bytes
    that are free: the log tells what is new alone."""
    return _DIGITS.sub("", reason) != _DIGITS.sub("", before)
