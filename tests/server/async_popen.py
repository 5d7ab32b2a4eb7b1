"""Processes for tests in an event loop, which start like subprocess.Popen and are awaited."""

import asyncio
import subprocess
from signal import Signals
from typing import Any

from forkserver import PYTHON, WarmPopen
from server.python import environment


class _Output(asyncio.StreamReaderProtocol):
    """Output of a pipe, until no process can write to the pipe any more."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.has_ended = asyncio.Event()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.has_ended.set()


class AsyncPopen:
    """A process, and what the process and its children write to stdout."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader, output: _Output
    ) -> None:
        self.pid = process.pid
        self.stdout = stdout
        self._process = process
        self._output = output

    @property
    def returncode(self) -> int | None:
        """Exit status; None while the process runs."""
        return self._process.poll()

    def send_signal(self, number: Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Returns the exit status, once the process and all children with its stdout have ended."""
        status = await asyncio.to_thread(self._process.wait)
        await self._output.has_ended.wait()
        return status

    async def ended(self) -> tuple[int, str]:
        """Returns (exit status, unread output) once the process has ended."""
        output = await self.stdout.read()
        return await self.wait(), output.decode()


async def start_python(*arguments: object, is_warm: bool = True, **options: Any) -> AsyncPopen:
    """Starts a Python process with the import path of this process. With ``is_warm``, the
    forkserver forks it with torch already imported."""
    popen = WarmPopen if is_warm else subprocess.Popen
    process = popen(
        [*PYTHON, *map(str, arguments)], env=environment(), stdout=subprocess.PIPE, **options
    )
    reader = asyncio.StreamReader()
    output = _Output(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: output, process.stdout)
    return AsyncPopen(process, reader, output)
