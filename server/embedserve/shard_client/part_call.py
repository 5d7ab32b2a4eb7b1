"""A lookup of one part: the calls of its replicas until one answers.

A lookup begins with one call. A slow call is hedged, a hung one is repeated elsewhere, and a
failed one is retried. The first answer wins, and the other calls are cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from embedserve.call_trace import CallTrace, TracedCall
from embedserve.model_names import VersionKey
from embedserve.shard_client.client_stream import OnReply
from embedserve.shard_client.replica import PartReplica
from embedserve.shard_client.reply import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Reply,
    lost,
    status_name,
)
from embedserve.shard_client.shard_connection import shown
from embedserve.tracing.trace_context import sampled_traceparent

if TYPE_CHECKING:
    from embedserve.shard_client.part_client import PartClient

RETRYABLE = (UNAVAILABLE, RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED)
"""Statuses after which another replica may answer, unless the request is too large for a shard."""
HEDGE_DUE, HANG_DUE, END_DUE = range(3)
"""Deadlines of an attempt, in order."""
BY_FIRST, BY_HEDGE, BY_RETRY, BY_HANG = "first", "hedge", "retry", "hung"
"""Reasons of an attempt, for traces."""
OUTCOME_BY_STATUS = {
    OK: "ok",
    DEADLINE_EXCEEDED: "deadline_exceeded",
    RESOURCE_EXHAUSTED: "overloaded",
    UNAVAILABLE: "unavailable",
}
OTHER_OUTCOME = "error"


class Attempt:
    """A call of one replica."""

    __slots__ = (
        "_end_s",
        "_handle",
        "_next",
        "_part_call",
        "_traced",
        "is_over",
        "replica",
        "start_s",
    )

    def __init__(
        self, part_call: PartCall, replica: PartReplica, now_s: float, next_due: int, reason: str
    ) -> None:
        """Calls the replica.

        Args:
            replica: replica with a connection.
            next_due: HEDGE_DUE if the call may be hedged, otherwise HANG_DUE.
            reason: why the replica is called, for traces.
        """
        client = part_call.client
        connection = replica.connection
        assert connection is not None
        self.is_over = False
        self.replica, self.start_s = replica, now_s
        self._part_call, self._next = part_call, next_due
        timeout_s = client.options.call_timeout_s
        if timeout_s > part_call.deadline_s - now_s:
            timeout_s = part_call.deadline_s - now_s
        self._end_s = now_s + timeout_s
        self._traced: TracedCall | None = None
        traceparent = b"" if part_call.calls is None else self._trace(part_call.calls, reason)
        self._handle = connection.call(part_call.message, timeout_s, self._on_reply, traceparent)
        self._set_timer(now_s, now_s)

    def _trace(self, calls: CallTrace, reason: str) -> bytes:
        """Records the call in ``calls``. Returns its traceparent header; b"" if there is no room
        for it."""
        replica = shown(self.replica.address)
        self._traced = traced = calls.begin(self._part_call.client.part, replica, reason)
        return b"" if traced is None else sampled_traceparent(calls.trace.trace_id, traced.span_id)

    def cancel(self, status: int = CANCELLED) -> None:
        """Cancels the call, whose span gets the outcome ``status``."""
        self.is_over = True
        self._handle.cancel()
        if self._traced is not None:
            self._traced.end(status_name(status))

    def _set_timer(self, since_s: float, now_s: float) -> None:
        """Sets the timer for the next deadline, counted from ``since_s``."""
        client = self._part_call.client
        due_s = self._end_s
        if self._next == HEDGE_DUE:
            due_s = since_s + client.recent.hedge_s
        elif self._next == HANG_DUE:
            due_s = since_s + client.recent.hung_s
        client.timers.push(due_s if due_s < self._end_s else self._end_s, self, now_s)

    def on_due(self, now_s: float) -> None:
        """Handles the next deadline of the call."""
        if now_s >= self._end_s:
            self.cancel(DEADLINE_EXCEEDED)
            hung_s = self._part_call.client.recent.hung_s
            self.replica.note_unanswered(self.start_s, now_s, hung_s)
            self._part_call.on_timeout(self, now_s)
        elif self._next == HEDGE_DUE:
            self._next = HANG_DUE
            self._set_timer(self.start_s, now_s)
            self._part_call.hedge(now_s)
        else:
            if self._part_call.on_hang(self, now_s):
                self._next = END_DUE
            self._set_timer(now_s, now_s)

    def is_silent(self, now_s: float) -> bool:
        """Whether the replica has sent nothing at all during the later half of the call."""
        connection = self.replica.connection
        return connection is not None and connection.last_received_s < (self.start_s + now_s) / 2

    def _on_reply(self, reply: Reply) -> None:
        self.is_over = True
        if self._traced is not None:
            self._traced.end(status_name(reply.status), reply.message)
        self._part_call.on_reply(self, reply)


class PartCall:
    """A lookup of one part.

    Attributes:
        client: client of the part that is looked up.
        message: chunks of the request message.
        deadline_s: time.monotonic() at which the lookup fails.
        calls: record of the calls for traces; None if no request is traced.
    """

    __slots__ = (
        "_attempts",
        "_key",
        "_nbytes",
        "_on_done",
        "_rejections",
        "_reply",
        "_start_s",
        "_tried",
        "calls",
        "client",
        "deadline_s",
        "message",
    )
    is_over = False  # for the timer queue, where it waits only until on_due

    def __init__(
        self,
        client: PartClient,
        key: VersionKey,
        message: Sequence[bytes],
        deadline_s: float,
        on_done: OnReply,
        calls: CallTrace | None,
    ) -> None:
        self.client, self._key, self.message = client, key, message
        self.calls = calls
        self.deadline_s, self._on_done = deadline_s, on_done
        self._nbytes = sum(map(len, message))
        self._attempts: list[Attempt] = []
        self._tried: list[PartReplica] = []
        self._rejections = 0
        self._reply: Reply | None = None  # to fail with, once nothing is left to try

    def start(self, now_s: float) -> None:
        """Makes the first call. A lookup that fails at once does so from the timer."""
        client = self.client
        self._start_s = now_s
        if now_s >= self.deadline_s:
            self._reply = self._late()
        else:
            replica = client.choose(self._key)
            if replica is not None:
                self._call(replica, now_s, HEDGE_DUE, BY_FIRST)
                return
            self._reply = lost(client.why_unavailable(self._key))
        client.timers.push(now_s, self, now_s)

    def on_due(self, now_s: float) -> None:
        """Fails a lookup that made no call."""
        assert self._reply is not None
        self._finish(self._reply, now_s)

    def _call(self, replica: PartReplica, now_s: float, next_due: int, reason: str) -> None:
        self.client.stats.bytes_sent += self._nbytes
        self._tried.append(replica)
        self._attempts.append(Attempt(self, replica, now_s, next_due, reason))

    # Events of calls

    def hedge(self, now_s: float) -> None:
        """Calls a second replica, as the first is slow, if the budget allows it."""
        client = self.client
        replica = client.choose(self._key, self._tried, is_optional=True)
        if replica is not None and client.hedges.try_take():
            client.stats.hedges += 1
            self._call(replica, now_s, HANG_DUE, BY_HEDGE)

    def on_hang(self, attempt: Attempt, now_s: float) -> bool:
        """Calls another replica, as ``attempt`` hangs. Returns whether it did.

        A silent replica is avoided from now on, and the budget is not asked. A replica that answers
        other calls is slow or overloaded, and a budget keeps the load of the part in bounds. The
        budget also holds if the other replica is silent, too: then the whole part is overloaded.
        """
        client, is_silent = self.client, attempt.is_silent(now_s)
        if is_silent:
            attempt.replica.mark_hung(now_s)
        replica = client.choose(self._key, self._tried, is_optional=not is_silent)
        if replica is None:
            return False
        is_free = is_silent and not replica.is_hung
        if not is_free and not client.retries.try_take():
            return False
        client.stats.hung += is_silent
        client.stats.retries += not is_silent
        self._call(replica, now_s, HANG_DUE, BY_HANG if is_silent else BY_RETRY)
        return True

    def on_timeout(self, attempt: Attempt, now_s: float) -> None:
        """Handles a call without an answer in time."""
        if now_s >= self.deadline_s:
            self._finish(self._late(), now_s)
        else:
            timeout_s = self.client.options.call_timeout_s
            text = f"{self.client}: no response within {timeout_s:g} s"
            self._on_failure(attempt, Reply(DEADLINE_EXCEEDED, text), now_s)

    def on_reply(self, attempt: Attempt, reply: Reply) -> None:
        """Handles the reply to a call: returns it to the caller, or calls another replica."""
        now_s = self.client.clock()
        status = reply.status
        if status == OK:
            self.client.recent.add(now_s - attempt.start_s)
            self.client.stats.bytes_received += len(reply.payload)
        elif status in RETRYABLE and not reply.is_too_large:
            self._on_failure(attempt, reply, now_s)
            return
        self._attempts.remove(attempt)
        self._finish(reply, now_s)

    def _on_failure(self, attempt: Attempt, reply: Reply, now_s: float) -> None:
        client = self.client
        self._attempts.remove(attempt)
        if reply.is_lost:
            reply = lost(f"{client}: {reply.message}")
        self._rejections += reply.status == RESOURCE_EXHAUSTED
        if _outranks(reply, self._reply):
            self._reply = reply
        if now_s >= self.deadline_s:
            self._finish(self._late(), now_s)
            return
        if self._rejections < 2:
            replica = client.choose(self._key, self._tried)
            if replica is not None and (reply.is_lost or client.retries.try_take()):
                client.stats.retries += 1
                self._call(replica, now_s, HANG_DUE, BY_RETRY)
        if not self._attempts:
            assert self._reply is not None
            self._finish(self._reply, now_s)

    def _late(self) -> Reply:
        return Reply(DEADLINE_EXCEEDED, f"{self.client}: the deadline has passed")

    def _finish(self, reply: Reply, now_s: float) -> None:
        """Cancels the other calls, and returns ``reply`` to the caller. A cancelled call that was
        slow counts as a latency: it would have taken at least as long."""
        client = self.client
        attempts, self._attempts = self._attempts, []
        for attempt in attempts:
            attempt.cancel()
            if now_s - attempt.start_s > client.recent.hedge_s:
                client.recent.add(now_s - attempt.start_s)
        self.message = ()  # timers keep the lookup for some time
        client.stats.count_call(outcome_of(reply), now_s - self._start_s)
        self._on_done(reply)


def outcome_of(reply: Reply) -> str:
    """Returns the outcome of a lookup that ends with ``reply``."""
    return (
        OTHER_OUTCOME if reply.is_too_large else OUTCOME_BY_STATUS.get(reply.status, OTHER_OUTCOME)
    )


def _outranks(reply: Reply, former: Reply | None) -> bool:
    """Returns whether the caller gets ``reply`` rather than a former failure: a rejection with the
    longest retry-after comes first, then the latest failure of a replica that is not lost."""
    if former is None:
        return True
    if former.status != RESOURCE_EXHAUSTED:
        return former.is_lost or not reply.is_lost
    return reply.status == RESOURCE_EXHAUSTED and reply.retry_after_s > former.retry_after_s
