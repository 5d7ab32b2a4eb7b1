"""Tests of reports to the service manager: paths, abstract names, and sockets that cannot take
them."""

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from embedserve.processes import service_manager
from embedserve.processes.serve import notifier
from embedserve.processes.service_manager import notify


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_a_state_is_sent_as_one_datagram(tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "notify") if kind == "path" else f"@embedserve-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address.replace("@", "\0", 1))
        manager.settimeout(60)
        notify(address, "READY=1")
        assert manager.recv(4096) == b"READY=1"


def test_unusable_notify_socket_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = str(tmp_path / "nowhere")
    with caplog.at_level(logging.WARNING):
        notify(address, "READY=1")
        notify("/" + "long" * 100, "STOPPING=1")
    first, second = caplog.messages
    assert first.startswith(f"READY=1 was not reported to NOTIFY_SOCKET '{address}': ")
    assert second.startswith("STOPPING=1 was not reported")


def test_full_queue_of_the_service_manager_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_manager, "SEND_S_MAX", 0.01)
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        while not caplog.messages:
            notify(address, "READY=1")
    assert "READY=1 was not reported" in caplog.messages[0]


def test_notify_socket_is_removed_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(60)
        notifier()("STOPPING=1")
        assert manager.recv(4096) == b"STOPPING=1"
    assert "NOTIFY_SOCKET" not in os.environ


def test_module_is_not_imported_without_a_service_manager() -> None:
    script = (
        "import sys\n"
        "from embedserve.processes.serve import notifier\n"
        "notifier()('READY=1')\n"
        "assert 'embedserve.processes.service_manager' not in sys.modules\n"
    )
    environment = {name: os.environ[name] for name in os.environ if name != "NOTIFY_SOCKET"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)
