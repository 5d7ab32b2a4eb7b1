"""Forked servers (forkserver) for processes that Ray and others start, not the tests.

When such a process starts `embedserve serve`, warm_site/sitecustomize.py makes the new process a
stand-in. It requests a forked server from this relay and passes on the signals that it receives. It
exits with the server's status. If the stand-in dies, the relay kills the server.
"""

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forkserver import LENGTH_BYTES, PYTHON, WarmPopen, received

SITE = Path(__file__).parent / "warm_site"
CREDENTIALS = struct.Struct("3i")


class WarmRelay:
    """Starts the servers that stand-ins request at a socket.

    Attributes:
        environment: variables of the processes whose children are forked. PYTHONPATH must begin
            with SITE.
        servers: process id of each stand-in to that of its server.
    """

    def __init__(self, path: Path) -> None:
        self.environment = {"WARM_RELAY": str(path)}
        self.servers: dict[int, int] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                channel, _ = self._listener.accept()
                threading.Thread(target=self._run, args=(channel,), daemon=True).start()

    def _run(self, channel: socket.socket) -> None:
        """Starts a server, and reports its exit status to its stand-in."""
        with channel:
            head, files, _, _ = socket.recv_fds(channel, LENGTH_BYTES, 3)
            try:
                start_request = json.loads(received(channel, int.from_bytes(head)))
                process = _started(start_request, files)
            finally:
                for file in files:
                    os.close(file)
            peer = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            self.servers[CREDENTIALS.unpack(peer)[0]] = process.pid
            passing_on = threading.Thread(target=_pass_on_signals, args=(channel, process))
            passing_on.start()
            status = process.wait()
            with suppress(OSError):  # the stand-in was killed
                channel.sendall(status.to_bytes(LENGTH_BYTES, signed=True))
            passing_on.join()


def _started(start_request: dict[str, Any], files: list[int]) -> WarmPopen:
    stdin, stdout, stderr = files
    command = [PYTHON[0], *start_request["args"]]
    return WarmPopen(
        command,
        cwd=start_request["cwd"],
        env=start_request["env"],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )


def _pass_on_signals(channel: socket.socket, process: WarmPopen) -> None:
    with suppress(OSError):
        while number := channel.recv(1):
            process.send_signal(number[0])
    process.kill()


@contextmanager
def warm_relay(folder: Path) -> Iterator[WarmRelay]:
    """Runs a relay inside the context. ``folder`` needs a short path, because it holds a socket."""
    relay = WarmRelay(folder / "warm")
    try:
        yield relay
    finally:
        relay.close()
