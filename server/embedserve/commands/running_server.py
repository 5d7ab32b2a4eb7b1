"""Client of a running server for the command line: plain connections, TLS or a Unix socket, with or
without a token.

The peer may not be embedserve, or may be slow or endless: the bytes and the time of a response are
bounded. Proxies and redirects are ignored, so that a token is sent only to the given address.
Nothing heavy is imported, because a healthcheck runs repeatedly.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from embedserve_store.terminal.sanitize import sanitize

PORTS = {"http": 80, "https": 443}
UNIX = re.compile(r"unix:(?://(?=/)|(?!//))(.+)", re.IGNORECASE)
"""URL of a Unix socket, in the syntax of the Python clients and gRPC."""
URL_EXAMPLES = "http://localhost:8000, https://host:8000 or unix:/run/embed/http.sock"
TOKEN_VARIABLE = "EMBEDSERVE_TOKEN"
TOKEN_BYTES_MAX = 4096
ERROR_TEXT_MAX = 500
"""Characters of an untrusted server's error message that are shown."""
Response = tuple[int, bytes]
"""Status and body of a response."""


class CertificateRequiredError(ConnectionError):
    """The server requires a client certificate, and none was presented."""


@dataclass(frozen=True)
class ServerClient:
    """Address of a server, and the credentials presented to it.

    Attributes:
        url: http://HOST:PORT, https://HOST:PORT, HOST:PORT for plain HTTP, or unix:PATH. All but
            the last may have a path prefix, under which a proxy exposes the server.
        ca: PEM file of trusted authorities, in place of the system's.
        cert, key: PEM files of the client certificate, and of its key if that is in another file.
        token: bearer token; "" sends none.
        is_own_host: whether the server is on this host, in which case its certificate is not
            verified.
    """

    url: str
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token: str = field(default="", repr=False)
    is_own_host: bool = False

    def request(
        self, path: str, *, timeout_s: float, bytes_max: int, body: bytes | None = None
    ) -> bytes:
        """Returns the response body of a GET of ``path``, or of a POST if a JSON ``body`` is given.

        Args:
            timeout_s: limit on the whole request.
            bytes_max: limit on the response body.

        Raises:
            ConnectionError: the server cannot be reached, responds with an error, is too slow or
                sends too much. CertificateRequiredError if it requires a certificate and none was
                presented.
            OSError: a file of ``ca``, ``cert`` or ``key`` cannot be read; the error names the file.
            ValueError: ``url`` is invalid, or one of these files has other contents.
        """
        connection, path_prefix = self._connection(timeout_s)

        def send() -> Response:
            headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
            if body is not None:
                headers["Content-Type"] = "application/json"
            method = "GET" if body is None else "POST"
            try:
                connection.request(method, path_prefix + path, body, headers)
                with connection.getresponse() as response:
                    read = response.read(bytes_max + 1)
                    if response.length and len(read) <= bytes_max:
                        raise http.client.IncompleteRead(read, response.length)
                    return response.status, read
            finally:
                connection.close()

        try:
            status, content = _within(timeout_s, send)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in (error.reason or ""):
                message = f"{self.url}: {path}: it requires a client certificate"
                raise CertificateRequiredError(message) from error
            raise ConnectionError(f"{self.url}: {path}: {_reason(error)}") from error
        if not 200 <= status < 300:
            raise ConnectionError(
                f"{self.url}: {path}: answered {_error_text(path, status, content)}"
            )
        if len(content) > bytes_max:
            raise ConnectionError(f"{self.url}: {path}: the response has over {bytes_max} bytes")
        return content

    def _connection(self, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
        """Returns (unopened connection, path prefix of the URL)."""
        unix = UNIX.fullmatch(self.url)
        split_url = _split_url("http://localhost" if unix else self.url)
        host, path_prefix = str(split_url.hostname), split_url.path.rstrip("/")
        port = split_url.port or PORTS[split_url.scheme]
        if split_url.scheme == "https":
            context = self._context()
            secure = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
            return secure, path_prefix
        if self.ca or self.cert or self.key:
            raise ValueError(
                f"url is {self.url!r}, without TLS: --ca, --cert and --key need https://"
            )
        if unix:
            return _UnixConnection(unix[1], timeout_s), path_prefix
        return http.client.HTTPConnection(host, port, timeout=timeout_s), path_prefix

    def _context(self) -> ssl.SSLContext:
        if self.key and not self.cert:
            raise ValueError(f"key is {self.key}, but there is no certificate: give --cert, too")
        for path in (self.ca, self.cert, self.key):
            if path is not None:
                with path.open("rb"):  # its errors name the path; those of ssl do not
                    pass
        if self.is_own_host:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError as error:
            raise ValueError(f"ca {self.ca} holds no certificates: {error.reason}") from error
        if self.cert is not None:
            try:
                # Without a password callback OpenSSL would prompt on the terminal for one.
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
            except ssl.SSLError as error:
                files = f"cert {self.cert} and key {self.key or self.cert}"
                raise ValueError(f"{files} are no pair: {error.reason}") from error
        return context


def server_at(
    url: str, ca: Path | None, cert: Path | None, key: Path | None, token_file: Path | None
) -> ServerClient:
    """Returns a client of the server at ``url``, with the token from a file or from the variable
    EMBEDSERVE_TOKEN.

    Raises:
        OSError: the token file cannot be read.
        ValueError: the file or variable holds no valid token; the message does not quote it.
    """
    if token_file is not None:
        with token_file.open("rb") as file:
            found, where = file.read(TOKEN_BYTES_MAX + 1), str(token_file)
    else:
        found, where = os.environb.get(TOKEN_VARIABLE.encode(), b""), TOKEN_VARIABLE
        if not found:
            return ServerClient(url, ca, cert, key)
    token = found.decode("ascii", "replace").strip()
    is_word = token.isascii() and token.isprintable() and " " not in token
    if not token or not is_word or len(found) > TOKEN_BYTES_MAX:
        raise ValueError(f"{where} holds no token, which is one word")
    return ServerClient(url, ca, cert, key, token)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP connection over a Unix socket of this host."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _split_url(url: str) -> SplitResult:
    if "@" in url:  # the URL is not quoted, because the text before "@" may be a password
        raise ValueError("url contains a user name: authenticate with --token-file")
    try:
        is_url = "://" in url or url.lower() == "unix:"
        split_url = urlsplit(url if is_url else f"http://{url}")
        is_address = split_url.scheme in PORTS and bool(split_url.hostname) and split_url.port != 0
    except ValueError:
        is_address = False
    is_printable = url.isprintable() and " " not in url
    if not is_address or not is_printable or split_url.query or split_url.fragment:
        raise ValueError(f"url is {url!r}, expected such as {URL_EXAMPLES}")
    return split_url


def _within(timeout_s: float, send: Callable[[], Response]) -> Response:
    """Returns or raises the result of ``send``, run in a thread.

    Raises:
        TimeoutError: ``send`` takes longer than ``timeout_s``. Its thread is then abandoned. A
            socket timeout would not do, since it covers one wait and restarts with every byte.
    """
    done: queue.SimpleQueue[Response | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(send())
        except Exception as error:
            done.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        response = done.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no complete response after {timeout_s:g} s") from None
    if isinstance(response, Exception):
        raise response
    return response


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message} (--ca)"
    return sanitize(str(error)) or type(error).__name__


def _error_text(path: str, status: int, body: bytes) -> str:
    """Returns the status and the message of an error response, from embedserve or an untrusted
    server."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        message = body.decode(errors="replace")
    text = f"{status}: {sanitize(message.strip()[:ERROR_TEXT_MAX])}".removesuffix(": ")
    if status == 401:
        return f"{text} (--token-file, or the variable {TOKEN_VARIABLE})"
    if status == 404 and text.endswith(": Not Found"):
        text += "; where there is a management port, ask the port of --management-port"
        if path.startswith("/admin/"):
            text += "; without one, a server accepts this only with --tokens"
    return text
