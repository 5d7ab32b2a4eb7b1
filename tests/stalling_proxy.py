"""A TCP proxy that stalls each connection after some bytes, until a test releases them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

BLOCK_BYTES = 1 << 16


class StallingProxy:
    """Forwards connections to a port of this host.

    Attributes:
        stalled: set once a connection has more bytes than the proxy passes.
        released: set by the test to deliver all remaining bytes.
        nbytes: response bytes of the connections that have ended.
    """

    def __init__(self, server_port: int, nbytes_passed: int) -> None:
        self.stalled = threading.Event()
        self.released = threading.Event()
        self.nbytes = 0
        self._server = ("127.0.0.1", server_port)
        self._nbytes_passed = nbytes_passed
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def run(self) -> None:
        """Accepts connections until the proxy is closed."""
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                for source, target in ((client, server), (server, client)):
                    forward = (source, target, source is server)
                    threading.Thread(target=self._forward, args=forward, daemon=True).start()

    def stall(self) -> None:
        """Holds all responses from now on, also of new connections, as if the host had vanished."""
        self._nbytes_passed = 0

    def close(self) -> None:
        self.released.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        nbytes = 0
        with closing(target), suppress(OSError):
            while data := source.recv(BLOCK_BYTES):
                nbytes += len(data)
                if is_answer and nbytes > self._nbytes_passed:
                    self.stalled.set()
                    self.released.wait()
                target.sendall(data)
        if is_answer:
            with self._lock:
                self.nbytes += nbytes


@contextmanager
def stalling_proxy(server_port: int, nbytes_passed: int) -> Iterator[StallingProxy]:
    proxy = StallingProxy(server_port, nbytes_passed)
    accepting = threading.Thread(target=proxy.run, daemon=True)
    accepting.start()
    try:
        yield proxy
    finally:
        proxy.close()
        accepting.join()
