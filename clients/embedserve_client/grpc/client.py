"""gRPC clients: one channel, for unary calls and streams.

The clients send the calls that `grpc_requests` builds, and retry them. `grpc_requests` also reads
the responses. `stream` implements the streams.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from embedserve_client.core.addresses import target_of
from embedserve_client.core.batch import Features, Weights
from embedserve_client.core.deadline import check_timeout
from embedserve_client.core.models import ModelInfo, ModelList
from embedserve_client.core.result import EmbedResult, OutputDType
from embedserve_client.core.retries import check_retries
from embedserve_client.core.retry_loop import answer, answer_async
from embedserve_client.core.security import File, Files, channel_credentials, headers_of
from embedserve_client.grpc.calls import Rpc, channel_options, grpc_errors
from embedserve_client.grpc.requests import GrpcRequests
from embedserve_client.grpc.stream import (
    StreamAnswer,
    StreamItem,
    stream_answers,
    stream_answers_async,
)

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_RECEIVE_BYTES_MAX = 64 * 2**20


class GrpcEmbedClient:
    """Client for lookups over gRPC. Threads may share it.

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
        if credentials is None and (ca is not None or certificate is not None):
            credentials = channel_credentials(ca, certificate)
        self._channel = _open_channel(grpc, target, receive_bytes_max, credentials)
        self._questions = GrpcRequests(self._channel, timeout_s, shared_memory)

    def embed(
        self,
        features: Features,
        *,
        weights: Weights | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        output_dtype: OutputDType = "float32",
        output_keys: Sequence[str] = (),
        routing_key: str | None = None,
    ) -> EmbedResult:
        """Returns the vectors of a batch.

        Args:
            features: ids of each feature, by feature name; `Features` lists the accepted formats.
            weights: weights of the ids, in the shape of the ids, for any of the features. Other
                features get weights of 1. A KeyedJaggedTensor carries its own.
            model: NAME, or NAME@VERSION or NAME@ALIAS for one of its versions. None selects the
                server's default model.
            timeout_s: time limit of the call in seconds, including retries; None uses the client's.
            output_dtype: "float32" or "float16". float16 halves the bytes; values beyond 65504
                become infinite.
            output_keys: keys to return; empty returns all keys of the model.
            routing_key: identifier of the caller, 1 to 256 printable ASCII characters. Equal keys
                get the same version while several versions share the model's traffic.

        Raises:
            EmbedServeClientError: the call failed; the module `errors` lists its subclasses.
        """
        question = self._questions.embed(
            features, weights, model, timeout_s, output_dtype, output_keys, routing_key
        )
        return answer(question, self._retries, self._send)

    def embed_stream(
        self, items: Iterable[StreamItem], *, timeout_s: float | None = None
    ) -> Generator[StreamAnswer, None, None]:
        """Yields the results of many requests over one stream, in order, as they arrive.

        Args:
            items: requests, as features or StreamRequests. Another thread reads ahead, as far as
                the server accepts requests.
            timeout_s: time limit of the whole stream in seconds; None is no limit.

        Yields an EmbedResult per item. A failed item yields its EmbedServeClientError instead, and
        the stream continues; `answer.result()` returns the result or raises the error. The
        generator itself raises only errors that end the stream, and exceptions of ``items``.
        Closing it cancels the rest.
        """
        open_call = partial(
            self._questions.stub.EmbedStream,
            timeout=check_timeout(timeout_s),
            metadata=self._metadata,
        )
        return stream_answers(open_call, items, self._questions.answers)

    def models(self) -> ModelList:
        """Returns all served models."""
        return answer(self._questions.models(), self._retries, self._send)

    def model(self, name: str) -> ModelInfo:
        """Returns a served model; raises UnknownModel if there is none of that name."""
        return answer(self._questions.model(name), self._retries, self._send)

    def _send(self, call: Rpc[T]) -> T:
        with grpc_errors(call.read_error):
            message = call.begin(self._metadata)
        return call.read(message)

    def close(self) -> None:
        """Closes the channel and removes the client's shared-memory files. Calls in flight are
        cancelled."""
        self._channel.close()
        self._questions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncGrpcEmbedClient:
    """Client for lookups over gRPC, bound to the event loop that creates it; arguments as for
    `GrpcEmbedClient`."""

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
        if credentials is None and (ca is not None or certificate is not None):
            credentials = channel_credentials(ca, certificate)
        self._channel = _open_channel(grpc.aio, target, receive_bytes_max, credentials)
        self._questions = GrpcRequests(self._channel, timeout_s, shared_memory)

    async def embed(
        self,
        features: Features,
        *,
        weights: Weights | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        output_dtype: OutputDType = "float32",
        output_keys: Sequence[str] = (),
        routing_key: str | None = None,
    ) -> EmbedResult:
        """Returns the vectors of a batch.

        Args:
            features: ids of each feature, by feature name; `Features` lists the accepted formats.
            weights: weights of the ids, in the shape of the ids, for any of the features. Other
                features get weights of 1. A KeyedJaggedTensor carries its own.
            model: NAME, or NAME@VERSION or NAME@ALIAS for one of its versions. None selects the
                server's default model.
            timeout_s: time limit of the call in seconds, including retries; None uses the client's.
            output_dtype: "float32" or "float16". float16 halves the bytes; values beyond 65504
                become infinite.
            output_keys: keys to return; empty returns all keys of the model.
            routing_key: identifier of the caller, 1 to 256 printable ASCII characters. Equal keys
                get the same version while several versions share the model's traffic.

        Raises:
            EmbedServeClientError: the call failed; the module `errors` lists its subclasses.
        """
        question = self._questions.embed(
            features, weights, model, timeout_s, output_dtype, output_keys, routing_key
        )
        return await answer_async(question, self._retries, self._send)

    def embed_stream(
        self,
        items: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[StreamAnswer, None]:
        """Yields the results of many requests over one stream; see `GrpcEmbedClient.embed_stream`.
        The items may be an async iterable, and are read in the event loop."""
        open_call = partial(
            self._questions.stub.EmbedStream,
            timeout=check_timeout(timeout_s),
            metadata=self._metadata,
        )
        return stream_answers_async(open_call, items, self._questions.answers)

    async def models(self) -> ModelList:
        """Returns all served models."""
        return await answer_async(self._questions.models(), self._retries, self._send)

    async def model(self, name: str) -> ModelInfo:
        """Returns a served model; raises UnknownModel if there is none of that name."""
        return await answer_async(self._questions.model(name), self._retries, self._send)

    async def _send(self, call: Rpc[T]) -> T:
        with grpc_errors(call.read_error):
            message = await call.begin(self._metadata)
        return call.read(message)

    async def close(self) -> None:
        """Closes the channel and removes the client's shared-memory files. Calls in flight are
        cancelled."""
        await self._channel.close()
        self._questions.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _open_channel(flavour: Any, target: str, receive_bytes_max: int, credentials: Any) -> Any:
    """Opens a channel of grpc or of grpc.aio, which use the same function names."""
    options = channel_options(receive_bytes_max, target)
    target, is_encrypted = target_of(target)
    if is_encrypted and credentials is None:
        credentials = grpc.ssl_channel_credentials()
    if credentials is None:
        return flavour.insecure_channel(target, options=options)
    return flavour.secure_channel(target, credentials, options=options)
