"""gRPC's side of what needs no I/O: options, calls as data, how one ended, errors made ours.

The sync and the async client share it; the messages themselves are `wire`'s.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc

from embedserve_client.core.addresses import names_several
from embedserve_client.errors import EmbedServeClientError, error_from

T = TypeVar("T")
ErrorOf = Callable[[Any], EmbedServeClientError]
"""Of a grpc.RpcError."""
RECONNECT_MS = 100
RECONNECT_MS_MAX = 5000
ROUND_ROBIN = '{"loadBalancingConfig": [{"round_robin": {}}]}'
"""A service config: calls take turns over all servers that answer. grpc by itself keeps to one."""
_FAILED_WRITE = "Internal error from Core"
# Between looks for the status that follows a failed write, which came within 10 ms.
_PAUSES_S = (0.0, 0.001, 0.01, 0.1)


def channel_options(receive_bytes_max: int, target: str) -> list[tuple[str, int | str]]:
    """grpc refuses answers over 4 MiB by itself, less than 512 examples may take; and it waits a
    second and more before it connects again, in which all calls fail."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", receive_bytes_max),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
    ]
    if names_several(target):
        options.append(("grpc.service_config", ROUND_ROBIN))
    return options


def error_of(error: Any) -> EmbedServeClientError:
    """What the status cannot say comes as trailing metadata, as HTTP has it in the answer."""
    metadata = dict(error.trailing_metadata() or ())
    retry_after = metadata.get("retry-after", "")
    return error_from(
        error.code().name,
        error.details() or "",
        field=str(metadata.get("embedserve-field", "")),
        retry_after_s=float(retry_after) if str(retry_after).isdigit() else None,
    )


@dataclass(frozen=True)
class Rpc(Generic[T]):
    """One call, and the readers of its answer and of its error.

    Attributes:
        method: the stub's, of a channel of grpc or of grpc.aio.
        metadata: beside what every call has.
    """

    method: Any
    request: Any
    read: Callable[[Any], T]
    timeout_s: float | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    read_error: ErrorOf = error_of

    def begin(self, metadata: tuple[tuple[str, str], ...]) -> Any:
        """The answer, or of grpc.aio what gives it; ``metadata`` is that of every call."""
        every = (*metadata, *self.metadata.items())
        return self.method(self.request, timeout=self.timeout_s, metadata=every)


@contextmanager
def grpc_errors(read: ErrorOf = error_of) -> Iterator[None]:
    """The boundary at which grpc's exceptions become ours."""
    try:
        yield
    except grpc.RpcError as error:
        raise read(error) from error


class Ending:
    """How an aio call ended, as the server said it.

    When a write fails because the call has just ended, grpc.aio puts a status of its own in
    place of the server's (https://github.com/grpc/grpc/issues/36066). Either comes first: the
    server's, which the done callback still sees, or grpc's, which the server's follows soon.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._first: tuple[Any, Any] = (None, _FAILED_WRITE)
        call.add_done_callback(self._note)

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """Code and details of the call, which has ended."""
        code, details = self._first
        for pause_s in _PAUSES_S:
            if details != _FAILED_WRITE:
                break
            await asyncio.sleep(pause_s)
            code, details = await self._call.code(), await self._call.details()
        return code, details or ""

    def _note(self, call: Any) -> None:
        """The status is there, so that awaiting it does not wait."""
        code = _at_once(call.code())
        if code is not None:
            self._first = code, _at_once(call.details())


def _at_once(answer: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for; None if it would wait."""
    try:
        answer.send(None)
    except StopIteration as returned:
        return returned.value
    answer.close()
    return None
