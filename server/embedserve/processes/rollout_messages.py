"""Messages between workers and the supervisor, each over its end of a worker's channel."""

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
    """Messages of a worker's channel, except rollout messages. The supervisor's end is closed when
    the supervisor ends."""

    WARM = b"warm"
    """Worker to supervisor: the worker is ready to serve, and waits for GO."""
    GO = b"go"
    READY = b"ready"
    """Worker to supervisor: the worker listens on both ports, and accepts no connection yet."""
    START_ACCEPTING = b"alone"
    """Supervisor to a ready worker: only workers listen on the ports now, accept connections."""
    ANNOUNCE = b"announce"
    """Supervisor to one worker, when all are ready for the first time: announce that the server is
    ready."""
    WATCH_STORE = b"look"
    """Supervisor to one worker: watch the store from now on, and report the desired versions
    (rollout_coordinator.py)."""
    RELOAD = b"reload"
    """Supervisor to that worker: poll for all served names now, regardless of the ``follow``
    setting. Worker to supervisor: an operator requests this poll."""


FAILED = b"failed "
"""Prefix of a worker's message of why it cannot serve."""


class SupervisorChannel:
    """The supervisor's end of a worker's channel. The socket holds about 160 messages. Messages
    beyond those that the worker has not read are queued, and sent in order once it reads."""

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, hear: Callable[[], None]
    ) -> None:
        """
        Args:
            selector: selector whose registered callbacks are called with their events.
            hear: called when there is a message to receive.
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
        """Unregisters and closes the channel of a worker that exits."""
        self._selector.unregister(self._sock)
        self.close()

    def close(self) -> None:
        """Closes only the socket, because a forked process shares its parent's selector."""
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
                pass  # a worker that has exited is reaped later
            self._unsent.popleft()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._sock, events, self._on_events)


class WorkerChannel:
    """The worker's end of its channel, used on its event loop. The socket holds about 160 messages.
    Messages beyond those that the supervisor has not read are queued, and sent in order once it
    reads."""

    def __init__(self, sock: socket.socket) -> None:
        """
        Args:
            sock: non-blocking socket.
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
                pass  # the supervisor has ended; the reader of the socket sees that
            self._unsent.popleft()
        loop.remove_writer(self._sock)


class RolloutStep(StrEnum):
    """Type of a rollout message, which is about one version."""

    DESIRED = "wanted"
    """Worker to supervisor: the store now points to this version. Supervisor to all: the desired
    version changed."""
    AVAILABLE = "found"
    """Worker to supervisor: this version differs from the served one, and is available at
    ``path``."""
    PREPARE = "prepare"
    """Supervisor to worker: load the version from ``path``, while the current one serves."""
    PREPARED = "prepared"
    """Worker to supervisor: the version is loaded and could serve."""
    SWITCH = "switch"
    """Supervisor to worker: serve this version from now on."""
    REFUSED = "refused"
    """Worker to supervisor: the version cannot be served, for ``reason``. Supervisor to all: the
    version is rejected."""
    UNOPENED = "unopened"
    """Worker to supervisor: the version cannot be opened now, for ``reason``, and the next poll
    retries it. Supervisor to all: the same report."""
    RETRY = "retry"
    """Worker to supervisor: a rejected version may be retried. Supervisor to all: the same."""
    SHARE = "share"
    """Worker to supervisor: share of traffic and of comparisons that the store sets for the name.
    The traffic is that of requests for its model without a version. Supervisor to all: apply it."""
    LOAD = "load"
    """Worker to supervisor: an operator loads this version. Like AVAILABLE, but also for a name
    that is not served yet."""
    REMOVE = "remove"
    """Worker to supervisor: an operator unloads the name. Supervisor to all: unload it."""


@dataclass(frozen=True)
class RolloutMessage:
    """A rollout message between a worker and the supervisor.

    Attributes:
        name: name that the version is served by: NAME, NAME@VERSION or NAME@ALIAS.
        attempt: number of a PREPARE message, repeated in the messages that reply to it.
        share, shadow: percentages for ``version`` once it serves; if ``version`` is 0, for the
            version that serves now.
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
    """Returns whether ``reason`` differs from ``before`` in more than numbers, such as free bytes.
    Only new reasons are logged."""
    return _DIGITS.sub("", reason) != _DIGITS.sub("", before)
