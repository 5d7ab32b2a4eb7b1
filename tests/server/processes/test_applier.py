"""The supervisor starts the applier of deltas, replaces it, and makes workers wait for its look."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from server.processes.test_supervisor import start, supervised

pytestmark = pytest.mark.usefixtures("warm")


async def test_workers_listen_after_the_first_look(tmp_path: Path) -> None:
    mode = tmp_path / "failure.deltas"
    mode.write_text("wait")
    server = await start(tmp_path, workers=1)
    try:
        await server.until_line("started 0")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await server.until_line("ready")
        mode.write_text("")
        await server.until_line("ready")
        server.process.terminate()
        status, _ = await server.ended()
        assert status == 0
    finally:
        if server.process.returncode is None:
            os.kill(server.process.pid, signal.SIGKILL)


async def test_an_applier_that_is_killed_is_replaced_while_workers_serve(tmp_path: Path) -> None:
    (tmp_path / "failure.deltas").write_text("")
    server = await start(tmp_path, workers=1)
    try:
        applier = int((await server.until_line("applier"))[-1].split()[1])
        server.http_port = int((await server.until_line("ready"))[-1].split()[1])
        os.kill(applier, signal.SIGKILL)
        lines = await server.until_line("applier")
        assert any(f"(process {applier}) was ended by SIGKILL: restarted" in one for one in lines)
        assert lines[-1].split()[2] == "stalled"  # until the next one has looked
        assert await server.post() == 200
        server.process.terminate()
        status, output = await server.ended()
        assert status == 0
        assert "killed" not in output
    finally:
        if server.process.returncode is None:
            os.kill(server.process.pid, signal.SIGKILL)


async def test_an_applier_that_ends_at_once_does_not_keep_the_server_from_starting(
    tmp_path: Path,
) -> None:
    (tmp_path / "failure.deltas").write_text("end")
    async with supervised(tmp_path, workers=1) as server:
        assert await server.post() == 200
