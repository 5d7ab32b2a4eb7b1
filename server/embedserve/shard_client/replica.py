"""One replica of a part: its connection, which is made again when lost, and what it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import random
from typing import NamedTuple

from google.protobuf.message import DecodeError

from embedserve.model_names import VersionKey
from embedserve.shard_client.client_stream import ClientStream
from embedserve.shard_client.reply import (
    DEADLINE_EXCEEDED,
    OK,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNAUTHENTICATED,
    Reply,
    status_name,
)
from embedserve.shard_client.shard_connection import Address, ShardConnection
from embedserve.shard_client.timer_queue import CallLater
from embedserve_proto.embedding_pb2 import ListModelsResponse

BACKOFF_S_MIN, BACKOFF_S_MAX = 0.1, 5.0
"""Seconds between two connects: doubled after each that fails, and shortened at random by up to
half. A connection that has lasted for POLL_S is made again at once."""
POLL_S = 1.0
"""Seconds between two calls of ListModels."""
POLLS_UNANSWERED_MAX = 5
"""Polls after which an unanswered ListModels fails; the replica then serves nothing."""

Connect = Callable[[Address, Callable[[], None], Callable[[str], None]], ShardConnection]
"""Begins to connect to an address. Calls the first callback once the connection is ready for calls,
and the second, with the reason, when it fails or ends; neither before it has returned."""


class ListedVersion(NamedTuple):
    """The fields of a listed version that must match."""

    fingerprint: str
    part: int
    part_count: int


class PartReplica:
    """A replica of a part.

    Attributes:
        connection: connection on which calls may begin; None while there is none.
        reason: why there is no connection, or no list of models.
    """

    def __init__(
        self,
        address: Address,
        connect: Connect,
        call_later: CallLater,
        on_change: Callable[[PartReplica], None],
    ) -> None:
        """Begins to connect.

        Args:
            on_change: called when the replica serves other versions than before.
        """
        self.address = address
        self.reason = "connecting"
        self.connection: ShardConnection | None = None
        self._connect, self._call_later, self._on_change = connect, call_later, on_change
        self._connecting: ShardConnection | None = None
        self._hung_s = float("-inf")
        self._unanswered_s = float("-inf")  # start of the first late call since it sent something
        self._backoff_s = BACKOFF_S_MIN
        self._is_closed = False
        self._listed: bytes | None = None  # the last response of ListModels
        self._served: dict[VersionKey, ListedVersion] = {}
        self._poll_call: ClientStream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._start()

    def mismatch(self, key: VersionKey, expected: ListedVersion) -> str:
        """Returns why the replica cannot serve a version as ``expected``; "" if it can."""
        if self.connection is None or self._listed is None:
            return self.reason
        served = self._served.get(key)
        if served is None:
            return f"does not serve {key}"
        if served == expected:
            return ""
        if served.fingerprint != expected.fingerprint:
            return (
                f"serves {key} with fingerprint {served.fingerprint or 'none'}, "
                f"expected {expected.fingerprint}"
            )
        return (
            f"serves part {served.part} of {served.part_count}, "
            f"expected {expected.part} of {expected.part_count}"
        )

    @property
    def is_hung(self) -> bool:
        """Whether the replica has sent nothing since a call to it hung."""
        connection = self.connection
        return connection is not None and connection.last_received_s < self._hung_s

    def mark_hung(self, now_s: float) -> None:
        """Avoids the replica until it sends something; asks it to, by a PING."""
        if self.connection is not None and not self.is_hung:
            self.connection.ping()
        self._hung_s = now_s

    def note_unanswered(self, start_s: float, now_s: float, hung_s: float) -> None:
        """Notes that the deadline of a call that began at ``start_s`` has passed. Marks the replica
        as hung if it has sent nothing for ``hung_s``, counted from the first such call: no deadline
        may be long enough for a call to hang."""
        connection = self.connection
        if connection is None or connection.last_received_s >= self._unanswered_s:
            self._unanswered_s = start_s
        elif now_s - self._unanswered_s >= hung_s:
            self.mark_hung(now_s)

    def close(self, reason: str) -> None:
        """Closes the connection after the calls in flight, and connects no more. The replica leaves
        first: calls that wait for a stream end now, and their ends may begin others."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._stop_poll()
        connection, self.connection = self.connection or self._connecting, None
        self.reason = reason
        self._serve(None, {})
        if connection is not None:
            connection.finish(reason)

    # Connecting

    def _start(self) -> None:
        self._connecting = self._connect(self.address, self._on_ready, self._on_end)

    def _on_ready(self) -> None:
        self.connection, self._connecting = self._connecting, None
        self.reason = "has not listed its models yet"
        self._poll()

    def _on_end(self, reason: str) -> None:
        if self._is_closed:
            return
        self.connection = self._connecting = None
        self.reason = reason
        self._stop_poll()
        if self._timer is not None:
            self._timer.cancel()
        delay_s = self._backoff_s * (1 - random() / 2)
        self._backoff_s = min(max(2 * self._backoff_s, BACKOFF_S_MIN), BACKOFF_S_MAX)
        self._timer = self._call_later(delay_s, self._start)
        self._serve(None, {})  # may close this replica

    # ListModels

    def _poll(self) -> None:
        connection = self.connection
        assert connection is not None
        self._timer = self._call_later(POLL_S, self._poll)
        if self._poll_call is None:
            self._polls = 0  # that have passed since
            timeout_s = POLLS_UNANSWERED_MAX * POLL_S
            self._poll_call = connection.list_models(timeout_s, self._on_models)
            return
        self._polls += 1
        if self._polls >= POLLS_UNANSWERED_MAX:
            self._stop_poll()
            self.reason = "does not answer ListModels"
            self._serve(None, {})

    def _stop_poll(self) -> None:
        call, self._poll_call = self._poll_call, None
        if call is not None:
            call.cancel()

    def _on_models(self, reply: Reply) -> None:
        self._poll_call = None
        if reply.is_lost or reply.status in (RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED):
            return  # on_end follows, or the shard is overloaded and serves what it served before
        if reply.status != OK:
            self.reason = f"ListModels failed with {status_name(reply.status)}: {reply.message}"
            if reply.status in (UNAUTHENTICATED, PERMISSION_DENIED):
                assert self.connection is not None
                self.connection.finish(self.reason)  # the next one has the present credentials
            else:
                self._serve(None, {})
            return
        if reply.payload == self._listed:
            self._backoff_s = 0.0
            return
        self._backoff_s = BACKOFF_S_MIN
        try:
            self._serve(reply.payload, _read_models(reply.payload))
        except DecodeError as error:
            self.reason = f"ListModels: malformed response: {error}"
            self._serve(None, {})

    def _serve(self, listed: bytes | None, served: dict[VersionKey, ListedVersion]) -> None:
        has_changed = listed != self._listed
        self._listed, self._served = listed, served
        if has_changed:
            self._on_change(self)


def _read_models(payload: bytes) -> dict[VersionKey, ListedVersion]:
    return {
        VersionKey(model.model, model.version): ListedVersion(
            model.fingerprint, model.part, model.parts
        )
        for model in ListModelsResponse.FromString(payload).models
    }
