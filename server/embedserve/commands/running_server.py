"""A running server as a command line names it, and a question to it.

Whatever command asks a server asks so: over plain connections, TLS or a Unix socket, with a token
or without. What answers may be no server of ours, slow or endless: its bytes and the time are
bounded. Neither proxies nor redirects are gone by: a token goes to the address that was named, and
nowhere else. Imports nothing heavy, as a healthcheck asks again and again.
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
"""As the Python clients and gRPC write it."""
FORMS = "http://localhost:8000, https://host:8000 or unix:/run/embed/http.sock"
TOKEN_VARIABLE = "EMBEDSERVE_TOKEN"
TOKEN_BYTES_MAX = 4096
SAID_MAX = 500
"""Characters of what a stranger says."""
Answer = tuple[int, bytes]
"""Status, body."""


class CertificateRequiredError(ConnectionError):
    """The server speaks with those who show a certificate, and none was shown."""


@dataclass(frozen=True)
class ServerClient:
    """Where a server is, and what it is shown.

    Attributes:
        url: http://HOST:PORT, https://HOST:PORT, HOST:PORT for the first, or unix:PATH; the first
            two may have a path, below which a proxy has the server.
        ca: PEM file of whom to trust, in place of the system's authorities.
        cert, key: PEM files of a certificate to show, and of its key where that is elsewhere.
        token: says who asks; "": nothing does.
        is_own_host: it is this host's, so that its certificate is not looked at.
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
        """What it answers when asked for ``path``, or when it is sent a ``body`` of JSON.

        Args:
            timeout_s: for all of it.
            bytes_max: of the answer.

        Raises:
            ConnectionError: it cannot be asked, refuses, is too slow or answers too much; a
                CertificateWantedError where it wants a certificate and is shown none.
            OSError: a file of ``ca``, ``cert`` or ``key`` cannot be read; names it.
            ValueError: ``url`` is none, or one of these files holds something else.
        """
        connection, before = self._connection(timeout_s)

        def pipeline() -> Answer:
            headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
            if body is not None:
                headers["Content-Type"] = "application/json"
            method = "GET" if body is None else "POST"
            try:
                connection.request(method, before + path, body, headers)
                with connection.getresponse() as answer:
                    said = answer.read(bytes_max + 1)
                    if answer.length and len(said) <= bytes_max:
                        raise http.client.IncompleteRead(said, answer.length)
                    return answer.status, said
            finally:
                connection.close()

        try:
            status, said = _within(timeout_s, pipeline)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in (error.reason or ""):
                wanted = f"{self.url}: {path}: it wants a certificate"
                raise CertificateRequiredError(wanted) from error
            raise ConnectionError(f"{self.url}: {path}: {_reason(error)}") from error
        if not 200 <= status < 300:
            raise ConnectionError(f"{self.url}: {path}: answered {_refusal(path, status, said)}")
        if len(said) > bytes_max:
            raise ConnectionError(f"{self.url}: {path}: it answers with over {bytes_max} bytes")
        return said

    def _connection(self, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
        """And what stands before each path."""
        unix = UNIX.fullmatch(self.url)
        parts = _parts_of("http://localhost" if unix else self.url)
        host, before = str(parts.hostname), parts.path.rstrip("/")
        port = parts.port or PORTS[parts.scheme]
        if parts.scheme == "https":
            context = self._context()
            secure = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
            return secure, before
        if self.ca or self.cert or self.key:
            raise ValueError(
                f"url is {self.url!r}, without TLS: --ca, --cert and --key are of https://"
            )
        if unix:
            return _UnixConnection(unix[1], timeout_s), before
        return http.client.HTTPConnection(host, port, timeout=timeout_s), before

    def _context(self) -> ssl.SSLContext:
        if self.key and not self.cert:
            raise ValueError(f"key is {self.key}, but of no certificate: give --cert, too")
        for path in (self.ca, self.cert, self.key):
            if path is not None:
                with path.open("rb"):  # whose errors name the path
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
                # Where a key is locked OpenSSL would ask the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
            except ssl.SSLError as error:
                files = f"cert {self.cert} and key {self.key or self.cert}"
                raise ValueError(f"{files} are no pair: {error.reason}") from error
        return context


def server_at(
    url: str, ca: Path | None, cert: Path | None, key: Path | None, token_file: Path | None
) -> ServerClient:
    """The server at ``url``, with the token of a file, or of the variable EMBEDSERVE_TOKEN.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no token in it; it is not quoted, whatever it is.
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
    """To a Unix socket of this host."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _parts_of(url: str) -> SplitResult:
    if "@" in url:  # not quoted: what stands before it may be a password
        raise ValueError("url names a user: who asks is said by --token-file")
    try:
        is_url = "://" in url or url.lower() == "unix:"
        parts = urlsplit(url if is_url else f"http://{url}")
        is_address = parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise ValueError(f"url is {url!r}, expected such as {FORMS}")
    return parts


def _within(timeout_s: float, ask: Callable[[], Answer]) -> Answer:
    """What ``ask`` returns or raises.

    Raises:
        TimeoutError: it takes longer. The thread that asks is left behind then, as the timeout of a
            socket is that of one wait and begins anew with every byte.
    """
    done: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(ask())
        except Exception as error:
            done.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer = done.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"the answer is not all there after {timeout_s:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message} (--ca)"
    return sanitize(str(error)) or type(error).__name__


def _refusal(path: str, status: int, body: bytes) -> str:
    """The status and what is said with it, be it ours or a stranger's."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        said = body.decode(errors="replace")
    said = f"{status}: {sanitize(said.strip()[:SAID_MAX])}".removesuffix(": ")
    if status == 401:
        return f"{said} (--token-file, or the variable {TOKEN_VARIABLE})"
    if status == 404 and said.endswith(": Not Found"):
        said += "; where there is a management port, ask the port of --management-port"
        if path.startswith("/admin/"):
            said += "; where there is none, a server takes this only with --tokens"
    return said
