"""The REST clients: protobuf inside HTTP, over a pool of kept-alive connections.

They send the calls that `rest_calls` makes, let it read the answers, and try again; nothing else
happens here.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import httpx

from embedserve_client.core.addresses import base_url_of, unix_path_of
from embedserve_client.core.batch import Features, Weights
from embedserve_client.core.models import ModelInfo, ModelList
from embedserve_client.core.result import EmbedResult, OutputDType
from embedserve_client.core.retries import check_retries
from embedserve_client.core.retry_loop import answer, answer_async
from embedserve_client.core.security import File, Files, headers_of, tls_context
from embedserve_client.rest.calls import Call, httpx_errors
from embedserve_client.rest.requests import RestRequests

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_CONNECTIONS_MAX = 64


class EmbedClient:
    """Lookups over REST; safe to share between threads.

    base_url: such as "http://127.0.0.1:8000", or "127.0.0.1:8000" for the same; "unix:/path" is a
        server's Unix socket.
    timeout_s: of calls that give none; None waits for ever. The server gets it as a deadline;
        on this side it limits connecting, sending and every wait for data, each alone.
    retries: how often a call that found the server overloaded or unavailable is made again, after
        what the server asks to wait and a random pause, within its timeout.
    connections_max: open at the same time; further calls wait for one within their timeout.
    transport: an httpx transport of your own, which then sees to TLS itself.
    token: says who asks, where the server wants to know.
    ca: a PEM file of whom to trust with https://, in place of the system's authorities.
    certificate: PEM files of the client's own and its key, where the server wants one.
    shared_memory: of a server on the same host, what its --shared-memory says, such as "/ranker-":
        large lookups then have their ids read from files of /dev/shm, and vectors written there.
        Close the client, which removes them. Results are views of such a file while they are held.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retries: int = 0,
        connections_max: int = DEFAULT_CONNECTIONS_MAX,
        transport: httpx.BaseTransport | None = None,
        token: str | None = None,
        ca: File | None = None,
        certificate: Files | None = None,
        shared_memory: str | None = None,
    ) -> None:
        self._calls = RestRequests(timeout_s, shared_memory)
        self._retries = check_retries(retries)
        limits, path, url = _limits(connections_max), unix_path_of(base_url), base_url_of(base_url)
        tls = tls_context(url, ca, certificate)
        if path is not None and transport is None:
            transport = httpx.HTTPTransport(uds=path, limits=limits, verify=tls)
        self._http = httpx.Client(
            base_url=url,
            limits=limits,
            transport=transport,
            headers=headers_of(token),
            verify=tls,
        )

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
        question = self._calls.embed(
            features, weights, model, timeout_s, output_dtype, output_keys, routing_key
        )
        return answer(question, self._retries, self._send)

    def models(self) -> ModelList:
        """Every served model."""
        return answer(self._calls.models(), self._retries, self._send)

    def model(self, name: str) -> ModelInfo:
        """One served model; UnknownModel if there is none of that name."""
        return answer(self._calls.model(name), self._retries, self._send)

    def close(self) -> None:
        """Closes the connections, and removes what is in shared memory."""
        self._http.close()
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, call: Call[T]) -> T:
        with httpx_errors():
            response = self._http.request(**call.arguments())
        return call.result(response)


class AsyncEmbedClient:
    """Lookups over REST from one event loop; arguments as `EmbedClient`."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retries: int = 0,
        connections_max: int = DEFAULT_CONNECTIONS_MAX,
        transport: httpx.AsyncBaseTransport | None = None,
        token: str | None = None,
        ca: File | None = None,
        certificate: Files | None = None,
        shared_memory: str | None = None,
    ) -> None:
        self._calls = RestRequests(timeout_s, shared_memory)
        self._retries = check_retries(retries)
        limits, path, url = _limits(connections_max), unix_path_of(base_url), base_url_of(base_url)
        tls = tls_context(url, ca, certificate)
        if path is not None and transport is None:
            transport = httpx.AsyncHTTPTransport(uds=path, limits=limits, verify=tls)
        self._http = httpx.AsyncClient(
            base_url=url,
            limits=limits,
            transport=transport,
            headers=headers_of(token),
            verify=tls,
        )

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
        question = self._calls.embed(
            features, weights, model, timeout_s, output_dtype, output_keys, routing_key
        )
        return await answer_async(question, self._retries, self._send)

    async def models(self) -> ModelList:
        """Every served model."""
        return await answer_async(self._calls.models(), self._retries, self._send)

    async def model(self, name: str) -> ModelInfo:
        """One served model; UnknownModel if there is none of that name."""
        return await answer_async(self._calls.model(name), self._retries, self._send)

    async def close(self) -> None:
        """Closes the connections, and removes what is in shared memory."""
        await self._http.aclose()
        self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _send(self, call: Call[T]) -> T:
        with httpx_errors():
            response = await self._http.request(**call.arguments())
        return call.result(response)


def _limits(connections_max: int) -> httpx.Limits:
    return httpx.Limits(max_connections=connections_max, max_keepalive_connections=connections_max)
