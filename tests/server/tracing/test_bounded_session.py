"""Tests of the bounded session: a slow, large or endless response of a collector is cut off."""

import gzip
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from certificates import Authority
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from embedserve.tracing.bounded_session import RESPONSE_BYTES_MAX, BoundedSession

HEAD = b"HTTP/1.1 200 OK\r\n"
BODY = b"spans"
PAUSE_S = 0.02
WAIT_S_MAX = 60.0


class FixedResponseServer:
    """A server that responds to each request with the same pieces, with a pause before each.

    Attributes:
        connections: accepted so far.
        requests: received so far.
    """

    def __init__(self, listening: socket.socket, pieces: Iterable[bytes], scheme: str) -> None:
        self.url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
        self.connections = self.requests = 0
        self._open = [listening]
        self._pieces = pieces
        self._stopped = threading.Event()

    def run(self) -> None:
        with suppress(OSError):  # the test has stopped it
            while True:
                connection, _ = self._open[0].accept()
                self._open.append(connection)
                self.connections += 1
                with connection, suppress(ConnectionError):
                    while self._receive_request(connection):
                        for piece in self._pieces:
                            if self._stopped.wait(PAUSE_S):
                                return
                            connection.sendall(piece)

    def _receive_request(self, connection: socket.socket) -> bool:
        """Reads a request; returns False once the client has closed the connection."""
        received = b""
        while not received.endswith(BODY):
            if not (more := connection.recv(1 << 16)):
                return False
            received += more
        self.requests += 1
        return True

    def stop(self) -> None:
        self._stopped.set()
        for one in self._open:
            with suppress(OSError):  # it is closed already
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving_response(
    pieces: Iterable[bytes], context: ssl.SSLContext | None = None
) -> Iterator[FixedResponseServer]:
    """Runs a server until the block ends; with TLS if there is a ``context``."""
    with socket.create_server(("127.0.0.1", 0)) as plain, ExitStack() as opened:
        listening = plain
        if context is not None:
            listening = opened.enter_context(context.wrap_socket(plain, server_side=True))
        server = FixedResponseServer(listening, pieces, "http" if context is None else "https")
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


class EndlessResponse:
    """Iterator over ``first``, then ``rest`` endlessly."""

    def __init__(self, first: bytes, rest: bytes) -> None:
        self._first, self._rest = first, rest

    def __iter__(self) -> Iterator[bytes]:
        yield self._first
        while True:
            yield self._rest


SLOW_RESPONSES = {
    "headers": EndlessResponse(HEAD + b"x: ", b"y"),
    "body": EndlessResponse(HEAD + b"content-length: 1000000\r\n\r\n", b"y"),
    "chunk": EndlessResponse(HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"y"),
    "without a length": EndlessResponse(HEAD + b"\r\n", b"y"),
}
OVERSIZED_RESPONSES = {
    "body": EndlessResponse(HEAD + b"content-length: 1000000000000000000\r\n\r\n", bytes(1 << 14)),
    "chunks": EndlessResponse(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\ny\r\n" * 4000),
    "headers": EndlessResponse(HEAD, b"x: " + b"y" * 2000 + b"\r\n"),
}


@pytest.mark.parametrize("where", SLOW_RESPONSES)
def test_slow_response_times_out(where: str) -> None:
    """Covers responses whose single bytes each come within the timeout."""
    with (
        serving_response(SLOW_RESPONSES[where]) as server,
        BoundedSession() as session,
        pytest.raises((RequestException, HTTPError), match="timed out"),
    ):
        session.post(server.url, BODY, timeout=50 * PAUSE_S)


@pytest.mark.parametrize("where", OVERSIZED_RESPONSES)
def test_oversized_response_is_rejected(where: str) -> None:
    with (
        serving_response(OVERSIZED_RESPONSES[where]) as server,
        BoundedSession() as session,
        pytest.raises((RequestException, HTTPError), match=f"exceeds {RESPONSE_BYTES_MAX} bytes"),
    ):
        session.post(server.url, BODY, timeout=WAIT_S_MAX)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_an_error_and_is_not_followed(status: int) -> None:
    with serving_response([HEAD + b"content-length: 0\r\n\r\n"]) as other:
        head = b"HTTP/1.1 %d x\r\nlocation: %s/\r\n" % (status, other.url.encode())
        with (
            serving_response([head + b"content-length: 0\r\n\r\n"]) as server,
            BoundedSession() as session,
            pytest.raises(RequestException, match=f"{status}, redirected to '{other.url}/'"),
        ):
            session.post(server.url, BODY, timeout=WAIT_S_MAX)
        assert (server.requests, other.connections) == (1, 0)


def test_response_limits_apply_over_tls(tmp_path: Path) -> None:
    authority = Authority()
    (tmp_path / "root.pem").write_bytes(authority.root)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.sign("collector").write(tmp_path, "collector"))
    with (
        serving_response(OVERSIZED_RESPONSES["body"], context) as server,
        BoundedSession() as session,
        pytest.raises((RequestException, HTTPError), match=f"exceeds {RESPONSE_BYTES_MAX} bytes"),
    ):
        session.post(server.url, BODY, timeout=WAIT_S_MAX, verify=str(tmp_path / "root.pem"))


@pytest.mark.parametrize("body", [b"", b"y" * 1000, gzip.compress(bytes(1 << 20))])
def test_short_response_keeps_the_connection_open(body: bytes) -> None:
    head = HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body)
    with serving_response([head, body]) as server, BoundedSession() as session:
        for _ in range(3):
            response = session.post(server.url, BODY, timeout=WAIT_S_MAX)
            assert (response.status_code, response.content) == (200, b"")
        assert (server.connections, server.requests) == (1, 3)
