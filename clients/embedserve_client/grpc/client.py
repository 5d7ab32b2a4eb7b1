"""The gRPC clients: one channel, single calls and streams.

They send the calls that `rpc_questions` makes, let it read the answers, and try again; streams are
`stream`'s. Nothing else happens here.
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
    """Lookups over gRPC; safe to share between threads.

    target: such as "127.0.0.1:8001", or "http://127.0.0.1:8001" for the same; with "https://" the
        channel is encrypted, by the system's certificates unless there are credentials;
        "unix:/path" is a server's Unix socket. Calls take turns over all servers that one of gRPC's
        own targets names, such as "dns:///embedserve-headless:8001" and
        "ipv4:10.0.0.1:8001,10.0.0.2:8001"; a stream stays with one.
    timeout_s: of calls that give none; None waits for ever.
    retries: how often a call (not a stream) that found the server overloaded or unavailable is made
        again, after what the server asks to wait and a random pause, within its timeout.
    receive_bytes_max: the largest answer taken.
    credentials: of a TLS channel, in place of ``ca`` and ``certificate``. One of these has gRPC's
        own targets, too, asked over TLS.
    token: says who asks, where the server wants to know.
    ca: a PEM file of whom to trust with https://, in place of the system's authorities.
    certificate: PEM files of the client's own and its key, where the server wants one.
    shared_memory: as of `EmbedClient`; streams go over the channel.
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
        """The vectors of a batch; raises EmbedServeClientError.

        model: NAME, or for one of its served versions NAME@VERSION or NAME@ALIAS.
        output_dtype: "float16" halves the bytes; past its largest, 65504, a value is infinite.
        output_keys: those that the answer is to have; none: all of the model.
        routing_key: who asks, answered by the same version each time where several share the model.
        """
        question = self._questions.embed(
            features, weights, model, timeout_s, output_dtype, output_keys, routing_key
        )
        return answer(question, self._retries, self._send)

    def embed_stream(
        self, items: Iterable[StreamItem], *, timeout_s: float | None = None
    ) -> Generator[StreamAnswer, None, None]:
        """The answers to items (features, or StreamRequests), in order, as they come.

        An item that failed gives its error in its place; `answer.result()` gives the result or
        raises the error. items is read ahead, in another thread, as far as the server takes
        requests. timeout_s limits the whole stream; None is no limit. The iterator raises only
        what ends the stream, and what items itself raises; closing it cancels the rest.
        """
        open_call = partial(
            self._questions.stub.EmbedStream,
            timeout=check_timeout(timeout_s),
            metadata=self._metadata,
        )
        return stream_answers(open_call, items, self._questions.answers)

    def models(self) -> ModelList:
        """Every served model."""
        return answer(self._questions.models(), self._retries, self._send)

    def model(self, name: str) -> ModelInfo:
        """One served model; UnknownModel if there is none of that name."""
        return answer(self._questions.model(name), self._retries, self._send)

    def _send(self, call: Rpc[T]) -> T:
        with grpc_errors(call.read_error):
            message = call.begin(self._metadata)
        return call.read(message)

    def close(self) -> None:
        """Closes the channel, and removes what is in shared memory; calls under way are
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
    """Lookups over gRPC from the event loop it is built in; arguments as `GrpcEmbedClient`."""

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
        """The vectors of a batch; raises EmbedServeClientError.

        model: NAME, or for one of its served versions NAME@VERSION or NAME@ALIAS.
        output_dtype: "float16" halves the bytes; past its largest, 65504, a value is infinite.
        output_keys: those that the answer is to have; none: all of the model.
        routing_key: who asks, answered by the same version each time where several share the model.
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
        """As `GrpcEmbedClient.embed_stream`; items may be async and is read in the event loop."""
        open_call = partial(
            self._questions.stub.EmbedStream,
            timeout=check_timeout(timeout_s),
            metadata=self._metadata,
        )
        return stream_answers_async(open_call, items, self._questions.answers)

    async def models(self) -> ModelList:
        """Every served model."""
        return await answer_async(self._questions.models(), self._retries, self._send)

    async def model(self, name: str) -> ModelInfo:
        """One served model; UnknownModel if there is none of that name."""
        return await answer_async(self._questions.model(name), self._retries, self._send)

    async def _send(self, call: Rpc[T]) -> T:
        with grpc_errors(call.read_error):
            message = await call.begin(self._metadata)
        return call.read(message)

    async def close(self) -> None:
        """Closes the channel, and removes what is in shared memory; calls under way are
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
    """A channel of grpc or of grpc.aio, which name the functions alike."""
    options = channel_options(receive_bytes_max, target)
    target, is_encrypted = target_of(target)
    if is_encrypted and credentials is None:
        credentials = grpc.ssl_channel_credentials()
    if credentials is None:
        return flavour.insecure_channel(target, options=options)
    return flavour.secure_channel(target, credentials, options=options)
