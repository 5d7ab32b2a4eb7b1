"""HTTP session with a collector of traces, whose responses are bounded in bytes and in time.

requests reads a response whole, whatever its length, and its timeout begins anew with each read. A
collector could make the server hold any number of bytes, or hold the thread that exports for ever.
"""

from __future__ import annotations

import io
import socket
from http.client import HTTPResponse
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from urllib3 import HTTPConnectionPool

RESPONSE_BYTES_MAX = 1 << 16
"""Bytes of a response with its headers."""


class BoundedSession(requests.Session):
    """Session that rejects a response over RESPONSE_BYTES_MAX, one that has not arrived whole
    within the timeout of its request, and a redirect. Its responses have no content."""

    def __init__(self) -> None:
        super().__init__()
        for scheme in ("http://", "https://"):
            self.mount(scheme, _BoundedAdapter())

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        response = super().request(*args, **kwargs | {"stream": True, "allow_redirects": False})
        # Read for the connection to be used again. Decoded, the bytes could be a thousand times as
        # many.
        response.raw.read(RESPONSE_BYTES_MAX, decode_content=False)
        if 300 <= response.status_code < 400:  # the exporter would take it for a success
            location = response.headers.get("location", "")
            raise requests.RequestException(f"{response.status_code}, redirected to {location!r}")
        return response


class _BoundedAdapter(HTTPAdapter):
    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> HTTPConnectionPool:
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        is_tls = pool.scheme == "https"
        pool.ConnectionCls = _BoundedHttpsConnection if is_tls else _BoundedHttpConnection
        return pool


class _BoundedReader(io.RawIOBase):
    """Reads one response from the file of a socket."""

    def __init__(self, sock: socket.socket, file: io.RawIOBase) -> None:
        self._sock = sock
        self._file = file
        self._timeout_s = sock.gettimeout()
        self._until_s = None if self._timeout_s is None else monotonic() + self._timeout_s
        self._left = RESPONSE_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        if self._until_s is not None:
            left_s = self._until_s - monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            self._sock.settimeout(left_s)
        count = cast("int | None", self._file.readinto(buffer))
        self._left -= count or 0
        if self._left < 0:
            raise OSError(f"the response exceeds {RESPONSE_BYTES_MAX} bytes")
        return count

    def close(self) -> None:
        if not self.closed:
            self._sock.settimeout(self._timeout_s)  # for the next request
            self._file.close()
        super().close()


class _BoundedResponse(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_BoundedReader(sock, self.fp.detach()))


class _BoundedHttpConnection(HTTPConnection):
    response_class = _BoundedResponse


class _BoundedHttpsConnection(HTTPSConnection):
    response_class = _BoundedResponse
