"""Processes for tests in an event loop: started as by subprocess.Popen, waited for beside it."""

from __future__ import annotations

import asyncio
import subprocess
from signal import Signals
from typing import Any

from forkserver import PYTHON, WarmPopen
from server.python import environment


class _Output(asyncio.StreamReaderProtocol):
    """Of a pipe, until nobody can write to it any more."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.has_ended = asyncio.Event()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.has_ended.set()


class AsyncPopen:
    """A process, and what it and its children write to stdout."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader, output: _Output
    ) -> None:
        self.pid = process.pid
        self.stdout = stdout
        self._process = process
        self._output = output

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def send_signal(self, number: Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """The exit status, once it has ended and so have those that have its stdout."""
        status = await asyncio.to_thread(self._process.wait)
        await self._output.has_ended.wait()
        return status

    async def ended(self) -> tuple[int, str]:
        """(exit status, what was still written)."""
        output = await self.stdout.read()
        return await self.wait(), output.decode()


async def start_python(*arguments: object, is_warm: bool = True, **options: Any) -> AsyncPopen:
    """Which can import what this one can, and has torch imported already (forkserver) unless it is
    not ``is_warm``."""
    popen = WarmPopen if is_warm else subprocess.Popen
    process = popen(
        [*PYTHON, *map(str, arguments)], env=environment(), stdout=subprocess.PIPE, **options
    )
    reader = asyncio.StreamReader()
    output = _Output(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: output, process.stdout)
    return AsyncPopen(process, reader, output)
