"""A supervised server in processes of its own, for the tests of the supervisor and the applier."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from running_servers import children_of
from server.async_popen import AsyncPopen, start_python

SCRIPT = Path(__file__).parents[1] / "supervised.py"
BODY = b'{"features": {"user": [1]}}'
WAIT_S_MAX = 60
"""Seconds until a wait counts as failed.

20 did not suffice on a host with four times the load that it could carry.
"""
TIME = re.compile(r"^\S+ \S+ (?=[A-Z]+ embedserve)")
"""Matches the part of a log line before its level."""


@dataclass
class SupervisedServer:
    """A supervisor with its workers, in processes of their own."""

    process: AsyncPopen
    http_port: int
    failure: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def worker_pids(self) -> list[int]:
        return children_of(self.process.pid)

    @property
    def socket_file(self) -> Path:
        return Path(f"{self.failure}.sock")

    async def post(self, uds: str | None = None) -> int:
        """Returns the status of one embed request over a connection of its own."""
        transport = httpx.AsyncHTTPTransport(uds=uds, verify=False)
        async with httpx.AsyncClient(timeout=WAIT_S_MAX, transport=transport) as client:
            return (await client.post(f"{self.url}/embed", content=BODY)).status_code

    async def metric(self, *names: str) -> float:
        """Returns the sum of the samples of metrics in one scrape."""
        async with httpx.AsyncClient(timeout=WAIT_S_MAX, verify=False) as client:
            text = (await client.get(f"{self.url}/metrics")).text
        families = text_string_to_metric_families(text)
        return sum(s.value for family in families for s in family.samples if s.name in names)

    async def until_metric(self, name: str, is_right: Callable[[float], bool]) -> None:
        """Scrapes until ``is_right``. A connection to a worker that was just killed may break."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if is_right(await self.metric(name)):
                        return
                await asyncio.sleep(0.02)

    async def until_line(self, start: str) -> list[str]:
        """Returns the output up to a line that begins with ``start``, without the times of log
        lines."""
        lines: list[str] = []
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                while not lines or not lines[-1].startswith(start):
                    line = await self.process.stdout.readline()
                    assert line, f"ended after {lines}"
                    lines.append(TIME.sub("", line.decode().strip()))
        except TimeoutError:
            raise AssertionError(f"no line {start!r} after {lines}") from None
        return lines

    async def until_ready(self) -> list[str]:
        """Returns the output up to the line with the port."""
        lines = await self.until_line("ready")
        self.http_port = int(lines[-1].split()[1])
        return lines

    async def stop(self) -> str:
        """Stops the server with SIGTERM. Checks its exit status, and returns the remaining
        output."""
        self.process.terminate()
        status, output = await self.ended()
        assert status == 0, output
        return output

    async def ended(self) -> tuple[int, str]:
        """Returns (exit status, remaining output)."""
        async with asyncio.timeout(WAIT_S_MAX):
            return await self.process.ended()


@asynccontextmanager
async def supervised(
    tmp_path: Path,
    workers: int = 2,
    drain_s: float = 10,
    lookup_s: float = 0,
    hang_s: float = 0,
    is_warm: bool = True,
    is_awaited: bool = True,
) -> AsyncIterator[SupervisedServer]:
    """Starts a server, and waits until it is ready if it ``is_awaited``. Kills its remaining
    processes at the end."""
    failure = tmp_path / "failure"
    process = await start_python(
        *(SCRIPT, workers, drain_s, lookup_s, hang_s, failure),
        is_warm=is_warm,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    server = SupervisedServer(process, 0, failure)
    try:
        if is_awaited:
            await server.until_ready()
        yield server
    finally:
        if process.returncode is None:
            for pid in (process.pid, *server.worker_pids()):
                os.kill(pid, signal.SIGKILL)
        await process.wait()
