"""REST clients: protobuf messages over HTTP, through a pool of keep-alive connections."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.request import getproxies

import httpx

from embedserve_client.client import AsyncBaseClient, BaseClient
from embedserve_client.core.addresses import base_url_of, unix_path_of
from embedserve_client.core.retries import check_retries
from embedserve_client.core.security import File, Files, headers_of, tls_context
from embedserve_client.errors import EmbedServeClientError
from embedserve_client.rest.calls import Call, httpx_errors
from embedserve_client.rest.cancel_safe_transport import CancelSafeTransport
from embedserve_client.rest.requests import RestRequests

T = TypeVar("T")
C = TypeVar("C", httpx.Client, httpx.AsyncClient)

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_CONNECTIONS_MAX = 64


class EmbedClient(BaseClient):
    """Client for lookups over REST. Threads and forked processes may share it.

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
        transport: custom httpx transport, which then handles TLS itself. Calls in a forked process
            fail with RuntimeError.
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
        self._operations = RestRequests(timeout_s, shared_memory)
        self._retries = check_retries(retries)
        self._connections = _Connections(
            httpx.Client,
            httpx.HTTPTransport,
            base_url,
            connections_max,
            transport,
            token,
            ca,
            certificate,
        )

    def _send(self, call: Call[T]) -> T:
        http = self._connections.http()
        try:
            with httpx_errors(self._connections.address):
                response = http.request(**call.arguments())
        except EmbedServeClientError:
            raise
        except BaseException:  # of a signal handler, such as KeyboardInterrupt
            self._connections.replace(http)
            raise
        return call.result(response)

    def _disconnect(self) -> None:
        self._connections.http().close()


class AsyncEmbedClient(AsyncBaseClient):
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
        self._operations = RestRequests(timeout_s, shared_memory)
        self._retries = check_retries(retries)
        self._connections = _Connections(
            httpx.AsyncClient,
            CancelSafeTransport,
            base_url,
            connections_max,
            transport,
            token,
            ca,
            certificate,
        )

    async def _send(self, call: Call[T]) -> T:
        with httpx_errors(self._connections.address):
            response = await self._connections.http().request(**call.arguments())
        return call.result(response)

    async def _disconnect(self) -> None:
        await self._connections.http().aclose()


class _Connections(Generic[C]):
    """Client of httpx, sync or async, of the process that uses it.

    A forked process opens its own. If two processes sent requests over one connection, each would
    read responses to the other's.

    Attributes:
        address: base URL, or address of a Unix socket, for messages.
    """

    def __init__(
        self,
        make_client: Callable[..., C],
        make_transport: Callable[..., Any],
        base_url: str,
        connections_max: int,
        transport: Any,
        token: str | None,
        ca: File | None,
        certificate: Files | None,
    ) -> None:
        """Opens the client. A Unix socket and an async client need a transport of
        ``make_transport``, but httpx uses proxies of the environment only with its own. Raises
        ValueError for invalid arguments."""
        if not isinstance(connections_max, int) or connections_max < 1:
            raise ValueError(f"connections_max: {connections_max!r} is no integer from 1")
        limits = httpx.Limits(
            max_connections=connections_max, max_keepalive_connections=connections_max
        )
        path, url = unix_path_of(base_url), base_url_of(base_url)
        self.address = url if path is None else base_url
        tls = tls_context(url, ca, certificate)
        self._make_client: Callable[..., C] = partial(
            make_client, base_url=url, limits=limits, headers=headers_of(token), verify=tls
        )
        self._make_transport: Callable[[], Any] = lambda: None
        self._is_custom = transport is not None
        is_async = make_client is httpx.AsyncClient
        if transport is not None:
            self._make_transport = _InheritedTransport
        elif path is not None or (is_async and getproxies().keys() <= {"no"}):
            self._make_transport = partial(make_transport, uds=path, limits=limits, verify=tls)
            transport = self._make_transport()
        self._pid = os.getpid()
        self._http: C = self._make_client(transport=transport)

    def http(self) -> C:
        """Returns the client. Does not close one that a fork left here, whose connections belong to
        the parent process."""
        if os.getpid() != self._pid and not self._http.is_closed:
            self._http = self._make_client(transport=self._make_transport())
            self._pid = os.getpid()  # last, for threads that do not see it yet
        return self._http

    def replace(self, http: C) -> None:
        """Opens another client in place of ``http``, whose pool may have lost the connection of an
        interrupted call for good. Other calls in flight keep theirs."""
        if self._http is http and not http.is_closed and not self._is_custom:
            self._http = self._make_client(transport=self._make_transport())


class _InheritedTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Rejects the requests of a forked process, in place of a custom transport, which cannot be
    opened again."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        raise RuntimeError("a client with a custom transport cannot be used after a fork")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)
