"""Tests of the messages that a real server sends to its service manager (sd_notify)."""

import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from running_servers import READY_S_MAX, Running, running, status
from waits import wait_until

from embedserve_store import TableSpec, publish

CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender (unix(7))."""


class ServiceManager:
    """The socket on which systemd would receive messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive_message(self) -> tuple[int, str]:
        """Returns the process that sent the next datagram, and its text."""
        space = socket.CMSG_SPACE(CREDENTIALS.size)
        message, ancillary, _, _ = self._sock.recvmsg(4096, space)
        ((_, _, credentials),) = ancillary
        return CREDENTIALS.unpack(credentials)[0], message.decode()

    def is_empty(self) -> bool:
        self._sock.setblocking(False)
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self._sock.settimeout(READY_S_MAX)
        return False


@contextmanager
def service_manager(path: Path) -> Iterator[ServiceManager]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.settimeout(READY_S_MAX)
        sock.bind(str(path))
        yield ServiceManager(sock)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("notified") / "store"
    tables = [TableSpec("user", 100, 8, ("user",), "sum", "float32")]
    rows = {"ebc.embedding_bags.user.weight": torch.randn(100, 8)}
    publish(rows, store, model="m", tables=tables)
    return store


def replace_worker(server: Running) -> None:
    """Kills a worker, and waits until its replacement is ready."""
    os.kill(server.children()[0], signal.SIGKILL)
    wait_until(lambda: "is ready again" in server.log.read_text(), server.log.read_text)


@pytest.mark.parametrize("workers", [1, 2])
def test_main_process_reports_readiness_and_drain_once(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    with (
        service_manager(path) as manager,
        running(store, tmp_path / "log", "--workers", workers) as server,
    ):
        assert manager.receive_message() == (server.process.pid, "READY=1")
        assert status(f"{server.http}/health/ready") == 200
        if workers > 1:
            replace_worker(server)
        assert manager.is_empty()
        server.process.terminate()
        assert manager.receive_message() == (server.process.pid, "STOPPING=1")
        assert server.process.wait(timeout=60) == 0
        assert manager.is_empty()


def test_server_serves_if_its_notify_socket_is_missing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nowhere"))
    with running(store, tmp_path / "log") as server:
        assert status(f"{server.http}/health/ready") == 200
        server.process.terminate()
        assert server.process.wait(timeout=60) == 0
    log = server.log.read_text()
    assert "READY=1 was not reported to NOTIFY_SOCKET" in log
    assert "STOPPING=1 was not reported to NOTIFY_SOCKET" in log
