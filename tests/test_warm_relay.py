"""Tests of stand-ins for forked servers: signals, exit codes and ends are relayed."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_servers import command, is_running
from waits import wait_until
from warm_relay import SITE, WarmRelay, warm_relay

WAIT_S_MAX = 120


@pytest.fixture
def relay() -> Iterator[WarmRelay]:
    with tempfile.TemporaryDirectory() as folder, warm_relay(Path(folder)) as one:
        yield one


def start(relay: WarmRelay, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("serve", *arguments, "--http-port", 0, "--grpc-port", 0),
        env=os.environ | relay.environment | {"PYTHONPATH": str(SITE)},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_output_and_exit_code_are_those_of_the_server(relay: WarmRelay, tmp_path: Path) -> None:
    process = start(relay, tmp_path / "nothing")
    _, error_output = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 1
    assert f"embedserve: {tmp_path}/nothing" in error_output
    assert process.pid in relay.servers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_server_ends_with_the_relay(
    relay: WarmRelay, tmp_path: Path, number: signal.Signals
) -> None:
    with start(relay, tmp_path, "--wait") as process:
        assert process.stderr is not None
        process.stderr.readline()  # the server waits for a model
        assert is_running(relay.servers[process.pid])
        process.send_signal(number)
        process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == (0 if number == signal.SIGTERM else -number)
    wait_until(lambda: not is_running(relay.servers[process.pid]))


def test_relay_ends_with_the_signal_of_the_server(relay: WarmRelay, tmp_path: Path) -> None:
    with start(relay, tmp_path, "--wait") as process:
        assert process.stderr is not None
        process.stderr.readline()
        os.kill(relay.servers[process.pid], signal.SIGKILL)
        assert process.wait(WAIT_S_MAX) == -signal.SIGKILL
