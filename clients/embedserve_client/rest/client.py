"""REST clients: protobuf messages over HTTP, through a pool of keep-alive connections.

The clients send the calls that `rest_requests` builds, and retry them. `rest_requests` also reads
the responses.
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
    """Client for lookups over REST. Threads may share it.

    Use it as a context manager, or call `close`.

    Args:
        base_url: address such as "http://127.0.0.1:8000", or "127.0.0.1:8000" for the same.
            "unix:/path" is a Unix socket of the server.
        timeout_s: default time limit of a call in seconds; None waits forever. The server receives
            it as a deadline. The client applies it separately to connecting, sending and each wait
            for data.
        retries: number of retries of a call that found the server overloaded or unavailable. The
            client waits as long as the server requests, plus a random pause, within the call's
            timeout.
        connections_max: open connections at the same time; further calls wait for a connection
            within their timeout.
        transport: custom httpx transport, which then handles TLS itself.
        token: bearer token that authenticates the caller, if the server requires authentication.
        ca: PEM file of the certificate authorities to trust with https://, instead of the system's.
        certificate: (certificate, key) PEM files of the client, if the server requires mutual TLS.
        shared_memory: value of the --shared-memory option of a server on the same host, such as
            "/ranker-". Large lookups then exchange ids and vectors through files in /dev/shm.
            Results are views of such a file while the caller holds them. Close the client to remove
            the files.
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
        question = self._calls.embed(
            features, weights, model, timeout_s, output_dtype, output_keys, routing_key
        )
        return answer(question, self._retries, self._send)

    def models(self) -> ModelList:
        """Returns all served models."""
        return answer(self._calls.models(), self._retries, self._send)

    def model(self, name: str) -> ModelInfo:
        """Returns a served model; raises UnknownModel if there is none of that name."""
        return answer(self._calls.model(name), self._retries, self._send)

    def close(self) -> None:
        """Closes the connections and removes the client's shared-memory files."""
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
    """Client for lookups over REST from one event loop; arguments as for `EmbedClient`."""

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
        question = self._calls.embed(
            features, weights, model, timeout_s, output_dtype, output_keys, routing_key
        )
        return await answer_async(question, self._retries, self._send)

    async def models(self) -> ModelList:
        """Returns all served models."""
        return await answer_async(self._calls.models(), self._retries, self._send)

    async def model(self, name: str) -> ModelInfo:
        """Returns a served model; raises UnknownModel if there is none of that name."""
        return await answer_async(self._calls.model(name), self._retries, self._send)

    async def close(self) -> None:
        """Closes the connections and removes the client's shared-memory files."""
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
