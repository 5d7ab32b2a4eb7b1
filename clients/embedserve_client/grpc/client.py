"""gRPC clients: one channel, for unary calls and streams; `stream` implements the streams."""

from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable
from functools import partial
from typing import Any, TypeVar

import grpc

from embedserve_client.client import AsyncBaseClient, BaseClient
from embedserve_client.core.addresses import target_of
from embedserve_client.core.deadline import check_timeout
from embedserve_client.core.retries import check_retries
from embedserve_client.core.security import File, Files, channel_credentials, headers_of
from embedserve_client.grpc.calls import Rpc, channel_options, closed_errors, grpc_errors
from embedserve_client.grpc.requests import GrpcRequests
from embedserve_client.grpc.stream import (
    StreamAnswer,
    StreamItem,
    stream_answers,
    stream_answers_async,
)

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_RECEIVE_BYTES_MAX = 128 * 2**20
"""Bytes of a response; 128 MiB. A server's default limits allow 64 MiB of values, and beside them
lengths and names, which come from a body of up to 32 MiB."""


class GrpcEmbedClient(BaseClient):
    """Client for lookups over gRPC. Threads may share it; create it after a fork.

    Use it as a context manager, or call `close`.

    Args:
        target: address such as "127.0.0.1:8001", or "http://127.0.0.1:8001" for the same.
            "https://" encrypts the channel and trusts the system's authorities unless credentials
            are given. "unix:/path" is a Unix socket of the server. gRPC's own targets may name
            several servers, as "dns:///embedserve-headless:8001" or
            "ipv4:10.0.0.1:8001,10.0.0.2:8001" do. Calls then take turns over all of them, while a
            stream stays with one server.
        timeout_s: default time limit of a call in seconds; None waits forever.
        retries: number of retries of a unary call that found the server overloaded or unavailable.
            The client waits as long as the server requests, plus a random pause, within the call's
            timeout. Streams are not retried.
        receive_bytes_max: bytes of the largest response that the client accepts.
        credentials: gRPC channel credentials for TLS, instead of ``ca`` and ``certificate``. With
            any of the three, gRPC's own targets use TLS, too.
        token: bearer token that authenticates the caller, if the server requires authentication.
        ca: PEM file of the certificate authorities to trust with https://, instead of the system's.
        certificate: (certificate, key) PEM files of the client, if the server requires mutual TLS.
        shared_memory: as for `EmbedClient`; streams always use the channel.
    """

    _operations: GrpcRequests

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retries: int = 0,
        receive_bytes_max: int = DEFAULT_RECEIVE_BYTES_MAX,
        credentials: Any = None,
        token: str | None = None,
        ca: File | None = None,
        certificate: Files | None = None,
        shared_memory: str | None = None,
    ) -> None:
        timeout_s, self._retries = check_timeout(timeout_s), check_retries(retries)
        self._metadata = tuple(headers_of(token).items())
        self._channel = _open_channel(grpc, target, receive_bytes_max, credentials, ca, certificate)
        self._operations = GrpcRequests(self._channel, timeout_s, shared_memory)

    def embed_stream(
        self, items: Iterable[StreamItem], *, timeout_s: float | None = None
    ) -> Generator[StreamAnswer, None, None]:
        """Yields the results of many requests over one stream, in order, as they arrive.

        Args:
            items: requests, as features or StreamRequests. Another thread reads ahead, as far as
                the server accepts requests. If it waits for an item when the stream ends, it still
                takes that item, which is not sent.
            timeout_s: time limit of the whole stream in seconds; None is no limit.

        Yields an EmbedResult per item. A failed item yields its EmbedServeClientError instead, and
        the stream continues; `answer.result()` returns the result or raises the error. The
        generator itself raises only errors that end the stream, and exceptions of ``items``.
        Closing it cancels the rest.
        """
        open_call = partial(
            self._operations.stub.EmbedStream,
            timeout=check_timeout(timeout_s),
            metadata=self._metadata,
        )
        return stream_answers(open_call, items, self._operations.answers)

    def _send(self, call: Rpc[T]) -> T:
        with grpc_errors(call.read_error):
            message = call.begin(self._metadata)
        return call.result(message)

    def _disconnect(self) -> None:
        self._channel.close()


class AsyncGrpcEmbedClient(AsyncBaseClient):
    """Client for lookups over gRPC, bound to the event loop that creates it; arguments as for
    `GrpcEmbedClient`."""

    _operations: GrpcRequests

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retries: int = 0,
        receive_bytes_max: int = DEFAULT_RECEIVE_BYTES_MAX,
        credentials: Any = None,
        token: str | None = None,
        ca: File | None = None,
        certificate: Files | None = None,
        shared_memory: str | None = None,
    ) -> None:
        timeout_s, self._retries = check_timeout(timeout_s), check_retries(retries)
        self._metadata = tuple(headers_of(token).items())
        self._channel = _open_channel(
            grpc.aio, target, receive_bytes_max, credentials, ca, certificate
        )
        self._operations = GrpcRequests(self._channel, timeout_s, shared_memory)

    def embed_stream(
        self,
        items: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[StreamAnswer, None]:
        """Yields the results of many requests over one stream; see `GrpcEmbedClient.embed_stream`.
        The items may be an async iterable, and are read in the event loop."""
        open_call = partial(
            self._operations.stub.EmbedStream,
            timeout=check_timeout(timeout_s),
            metadata=self._metadata,
        )
        return stream_answers_async(
            open_call, items, self._operations.answers, lambda: self._is_closed
        )

    async def _send(self, call: Rpc[T]) -> T:
        with grpc_errors(call.read_error), closed_errors(lambda: self._is_closed):
            message = await call.begin(self._metadata)
        return call.result(message)

    async def _disconnect(self) -> None:
        await self._channel.close()


def _open_channel(
    flavour: Any,
    target: str,
    receive_bytes_max: int,
    credentials: Any,
    ca: File | None,
    certificate: Files | None,
) -> Any:
    """Opens a channel of grpc or of grpc.aio, which use the same function names."""
    if credentials is None and (ca is not None or certificate is not None):
        credentials = channel_credentials(ca, certificate)
    options = channel_options(receive_bytes_max, target)
    target, is_encrypted = target_of(target)
    if is_encrypted and credentials is None:
        credentials = grpc.ssl_channel_credentials()
    if credentials is None:
        return flavour.insecure_channel(target, options=options)
    return flavour.secure_channel(target, credentials, options=options)
