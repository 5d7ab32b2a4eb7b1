"""gRPC without I/O: channel options, calls as data, final statuses, and error translation.

The sync and the async client share it. `core.messages` encodes and decodes the messages.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc

from embedserve_client.core.addresses import names_several
from embedserve_client.core.retry_loop import CLOSED
from embedserve_client.errors import EmbedServeClientError, ServerError, Unavailable, error_from

T = TypeVar("T")
M = TypeVar("M")
ErrorOf = Callable[[Any], EmbedServeClientError]
"""Converts a grpc.RpcError."""
Status: TypeAlias = tuple[grpc.StatusCode, str | None, Any]
"""Code, details and trailing metadata of a call that has ended."""
RECONNECT_MS, RECONNECT_MS_MAX = 100, 5000
"""Milliseconds before the first attempt to reconnect, and at most before a later one."""
KEEPALIVE_MS = 20_000
"""Milliseconds without data, while calls are in flight, after which the server is pinged."""
KEEPALIVE_MS_MAX = 10_000
"""Milliseconds that a server may take to acknowledge a ping, and its host to acknowledge data."""
ROUND_ROBIN = '{"loadBalancingConfig": [{"round_robin": {}}]}'
"""gRPC service config that spreads calls over all servers that respond. By default gRPC uses one
server only."""
_FAILED_WRITE = "Internal error from Core"
# Pauses in seconds between polls for the status that follows a failed write. In practice it came
# within 10 ms.
_PAUSES_S = (0.0, 0.001, 0.01, 0.1)


def channel_options(receive_bytes_max: int, target: str) -> list[tuple[str, int | str]]:
    """Returns the channel options.

    By default grpc rejects responses over 4 MiB, which 512 examples may exceed. By default it also
    waits a second or more before it reconnects, and all calls fail in between. Without a keepalive
    it uses the connection to a host that vanished until TCP gives up, for about 15 minutes. After
    two pings without data, as on an idle stream, it would send one a minute.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", receive_bytes_max),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS_MAX),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
    ]
    if names_several(target):
        options.append(("grpc.service_config", ROUND_ROBIN))
    return options


def error_of(error: Any) -> EmbedServeClientError:
    """Converts a grpc error."""
    return status_error(error.code(), error.details(), error.trailing_metadata())


def status_error(
    code: grpc.StatusCode, details: str | None, trailing: Any
) -> EmbedServeClientError:
    """Converts the final status of a call. Its field and retry time are in the trailing metadata;
    HTTP has them in the response."""
    metadata = dict(trailing or ())
    retry_after = metadata.get("retry-after", "")
    return error_from(
        code.name,
        details or "",
        field=unquote(str(metadata.get("embedserve-field", ""))),
        retry_after_s=float(retry_after) if str(retry_after).isdigit() else None,
    )


@dataclass(frozen=True)
class Rpc(Generic[T]):
    """One gRPC call with the readers of its response and of its error.

    Attributes:
        method: method of the stub, from a channel of grpc or of grpc.aio.
        metadata: metadata of this call, in addition to the client's.
    """

    method: Any
    request: Any
    read: Callable[[Any], T]
    timeout_s: float | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    read_error: ErrorOf = error_of

    def begin(self, metadata: tuple[tuple[str, str], ...]) -> Any:
        """Starts the call with the client's ``metadata`` added. Returns the response, or for
        grpc.aio an awaitable of it."""
        every = (*metadata, *self.metadata.items())
        return self.method(self.request, timeout=self.timeout_s, metadata=every)

    def result(self, message: Any) -> T:
        """Returns the result in a response; raises ServerError if it is missing or malformed."""
        return self.read(check_message(message))


def check_message(message: M | None) -> M:
    """Returns a response unchanged. Raises ServerError for None, which grpc returns if the server
    sent no whole message before status OK, and grpc.aio also for a malformed message."""
    if message is None:
        raise ServerError("the server's answer is missing or malformed")
    return message


@contextmanager
def grpc_errors(read: ErrorOf = error_of) -> Iterator[None]:
    """Translates grpc exceptions raised in the block into EmbedServeClientError."""
    try:
        yield
    except grpc.RpcError as error:
        raise read(error) from error


@contextmanager
def closed_errors(is_closed: Callable[[], bool]) -> Iterator[None]:
    """Raises Unavailable where a block awaits a call of a closed client. grpc.aio cancels such
    calls as if their tasks were cancelled."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if not is_closed() or (task is not None and task.cancelling()):
            raise
        raise Unavailable(CLOSED) from error


class Ending:
    """Tracks the final status of an aio call, as sent by the server.

    When a write fails because the call has just ended, grpc.aio may report its own status instead
    of the server's (https://github.com/grpc/grpc/issues/36066). Either status may arrive first. If
    the server's is first, the done callback still sees it; otherwise it follows grpc's shortly
    after.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._first: Status = (grpc.StatusCode.UNKNOWN, _FAILED_WRITE, ())
        call.add_done_callback(self._note)

    async def status(self) -> Status:
        """Returns the code, details and trailing metadata of a call that has ended."""
        code, details, trailing = self._first
        for pause_s in _PAUSES_S:
            if details != _FAILED_WRITE:
                break
            await asyncio.sleep(pause_s)
            code, details = await self._call.code(), await self._call.details()
            trailing = await self._call.trailing_metadata()
        return code, details, trailing

    def _note(self, call: Any) -> None:
        """Stores the status in the done callback, where awaiting it does not block."""
        code = _result_now(call.code())
        if code is not None:
            self._first = code, _result_now(call.details()), _result_now(call.trailing_metadata())


def _result_now(answer: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that does not have to wait; None if it would wait."""
    try:
        answer.send(None)
    except StopIteration as returned:
        return returned.value
    answer.close()
    return None
