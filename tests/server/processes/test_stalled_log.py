"""Tests of servers whose log is not read: they serve, end in time, and report the dropped lines."""

import os
import select
import signal
import subprocess
import time
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest
from forkserver import PYTHON, WarmPopen
from running_servers import children_of
from server.metrics.metric_samples import parse_families, sample_value
from server.python import environment
from waits import wait_until

WAIT_S_MAX = 60.0
SERVER = Path(__file__).parents[1]
KINDS = ("one process", "two workers")
pytestmark = pytest.mark.usefixtures("warm")


class LoggingServer:
    """A server whose stdout and stderr are one pipe, which the test reads when it wants to."""

    def __init__(self, kind: str, tmp_path: Path) -> None:
        is_one = kind == "one process"
        arguments = (
            [SERVER / "drain_server.py", 0, 5, "native", 0]
            if is_one
            else [SERVER / "supervised.py", 2, 5, 0, 0, tmp_path / "failure"]
        )
        self._reading, self._writing = os.pipe()
        self.process = WarmPopen(
            [*PYTHON, *map(str, arguments)],
            env=environment(),
            stdout=self._writing,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        words = self.read_until("\n" if is_one else "ready ").split()
        if not is_one:
            words = words[words.index("ready") + 1 :] or self.read_until("\n").split()
        self.url = f"http://127.0.0.1:{words[0]}"

    def read_until(self, expected: str) -> str:
        text, end_s = "", time.monotonic() + WAIT_S_MAX
        while expected not in text:
            left_s = end_s - time.monotonic()
            assert left_s > 0, text
            if select.select([self._reading], [], [], left_s)[0]:
                text += os.read(self._reading, 1 << 16).decode()
        return text

    def stall(self) -> None:
        """Fills the pipe, which is not read from now on."""
        filling = os.open(f"/proc/self/fd/{self._writing}", os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(filling, b"." * 4096)
        os.close(filling)

    def send_invalid(self) -> None:
        """Sends an invalid request, which the server logs."""
        response = httpx.post(f"{self.url}/embed", content=b"{", timeout=WAIT_S_MAX)
        assert response.status_code == 400

    def dropped_lines(self) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT_S_MAX).text
        return sample_value(parse_families(text), "embedserve_log_lines_dropped_total")

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._reading)
        os.close(self._writing)


@pytest.mark.parametrize("kind", KINDS)
def test_stalled_log_blocks_neither_serving_nor_shutdown(kind: str, tmp_path: Path) -> None:
    with closing(LoggingServer(kind, tmp_path)) as server:
        server.stall()
        for _ in range(3):
            server.send_invalid()
        workers = children_of(server.process.pid)
        if workers:  # the supervisor, too, has something to log
            os.kill(workers[0], signal.SIGKILL)
            wait_until(lambda: len({*children_of(server.process.pid)} - {workers[0]}) > 1)
        else:
            assert server.dropped_lines() == 3
        assert httpx.get(f"{server.url}/health/live", timeout=WAIT_S_MAX).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S_MAX) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_log_lines_are_counted_and_reported_once_the_log_is_read(
    kind: str, tmp_path: Path
) -> None:
    with closing(LoggingServer(kind, tmp_path)) as server:
        server.stall()
        for _ in range(6):
            server.send_invalid()
        wait_until(lambda: server.dropped_lines() >= 6)
        server.read_until(".")
        server.process.send_signal(signal.SIGTERM)
        # The last line is not "stopped", because one worker may have got all requests, and the
        # other stops before it.
        server.read_until(" lines of the log were dropped: its reader did not keep up")
        assert server.process.wait(WAIT_S_MAX) == 0
