"""The gRPC clients: one channel, single calls and streams.

They call the generated stub; requests, answers and errors are `wire`'s, `stream`'s and
`rpc_calls`'s.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Self

import grpc

from embedserve_client.addresses import target_of
from embedserve_client.batch import Features, Weights, batch_of
from embedserve_client.deadline import check_timeout, timeout_of
from embedserve_client.errors import EmbedServeClientError
from embedserve_client.models import ModelInfo, ModelList, model_info_of, model_list_of
from embedserve_client.result import EmbedResult, OutputDType
from embedserve_client.retries import Tries, check_retries
from embedserve_client.routing import routing_headers
from embedserve_client.rpc_calls import channel_options, grpc_errors
from embedserve_client.security import Files, channel_credentials, headers_of
from embedserve_client.stream import StreamAnswer, StreamItem, stream_answers, stream_answers_async
from embedserve_client.wire import AnswerReader, request_of
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import embedding_pb2_grpc as pb_grpc

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_RECEIVE_BYTES_MAX = 64 * 2**20
NOTHING: Mapping[str, str] = MappingProxyType({})


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
        ca: str | None = None,
        certificate: Files | None = None,
    ) -> None:
        self._timeout_s = check_timeout(timeout_s)
        self._retries = check_retries(retries)
        self._answers = AnswerReader()
        self._metadata = tuple(headers_of(token).items())
        if credentials is None and (ca is not None or certificate is not None):
            credentials = channel_credentials(ca, certificate)
        self._channel = _open_channel(grpc, target, receive_bytes_max, credentials)
        self._stub = _stub_of(self._channel)

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
        batch = batch_of(features, weights)
        request = request_of(batch, model, output_dtype, output_keys)
        timeout_s = timeout_of(timeout_s, self._timeout_s)
        answer = self._call(self._stub.Embed, request, timeout_s, routing_headers(routing_key))
        return self._answers.read(answer, batch.batch_size)

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
            self._stub.EmbedStream, timeout=check_timeout(timeout_s), metadata=self._metadata
        )
        return stream_answers(open_call, items, self._answers)

    def models(self) -> ModelList:
        """Every served model."""
        request = pb.ListModelsRequest()
        return model_list_of(self._call(self._stub.ListModels, request, self._timeout_s))

    def model(self, name: str) -> ModelInfo:
        """One served model; UnknownModel if there is none of that name."""
        request = pb.GetModelRequest(model=name)
        return model_info_of(self._call(self._stub.GetModel, request, self._timeout_s))

    def _call(
        self, method: Any, request: Any, timeout_s: float | None, more: Mapping[str, str] = NOTHING
    ) -> Any:
        """``more`` metadata than every call has."""
        metadata = (*self._metadata, *more.items())
        tries = Tries(self._retries, timeout_s)
        while True:
            try:
                with grpc_errors():
                    return method(request, timeout=tries.left_s(), metadata=metadata)
            except EmbedServeClientError as error:
                pause_s = tries.pause_s(error)
                if pause_s is None:
                    raise
            time.sleep(pause_s)

    def close(self) -> None:
        """Closes the channel; calls under way are cancelled."""
        self._channel.close()

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
        ca: str | None = None,
        certificate: Files | None = None,
    ) -> None:
        self._timeout_s = check_timeout(timeout_s)
        self._retries = check_retries(retries)
        self._answers = AnswerReader()
        self._metadata = tuple(headers_of(token).items())
        if credentials is None and (ca is not None or certificate is not None):
            credentials = channel_credentials(ca, certificate)
        self._channel = _open_channel(grpc.aio, target, receive_bytes_max, credentials)
        self._stub = _stub_of(self._channel)

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
        batch = batch_of(features, weights)
        request = request_of(batch, model, output_dtype, output_keys)
        timeout_s = timeout_of(timeout_s, self._timeout_s)
        routing = routing_headers(routing_key)
        answer = await self._call(self._stub.Embed, request, timeout_s, routing)
        return self._answers.read(answer, batch.batch_size)

    def embed_stream(
        self,
        items: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[StreamAnswer, None]:
        """As `GrpcEmbedClient.embed_stream`; items may be async and is read in the event loop."""
        open_call = partial(
            self._stub.EmbedStream, timeout=check_timeout(timeout_s), metadata=self._metadata
        )
        return stream_answers_async(open_call, items, self._answers)

    async def models(self) -> ModelList:
        """Every served model."""
        request = pb.ListModelsRequest()
        return model_list_of(await self._call(self._stub.ListModels, request, self._timeout_s))

    async def model(self, name: str) -> ModelInfo:
        """One served model; UnknownModel if there is none of that name."""
        request = pb.GetModelRequest(model=name)
        return model_info_of(await self._call(self._stub.GetModel, request, self._timeout_s))

    async def _call(
        self, method: Any, request: Any, timeout_s: float | None, more: Mapping[str, str] = NOTHING
    ) -> Any:
        """``more`` metadata than every call has."""
        metadata = (*self._metadata, *more.items())
        tries = Tries(self._retries, timeout_s)
        while True:
            try:
                with grpc_errors():
                    return await method(request, timeout=tries.left_s(), metadata=metadata)
            except EmbedServeClientError as error:
                pause_s = tries.pause_s(error)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Closes the channel; calls under way are cancelled."""
        await self._channel.close()

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


def _stub_of(channel: Any) -> Any:
    """The generated stub, which has no types."""
    make_stub: Any = pb_grpc.EmbeddingServiceStub
    return make_stub(channel)
