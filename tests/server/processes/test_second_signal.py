"""Tests of a server of one process: the second signal ends it immediately."""

import asyncio
import signal
import subprocess

import pytest
from server.async_popen import start_python

SCRIPT = """
import asyncio, signal
from embedserve.processes.server import stop_or_end

async def main():
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_or_end, stop, number)
    print("started", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_the_second_signal_ends_the_process(second: signal.Signals) -> None:
    process = await start_python("-c", SCRIPT, stderr=subprocess.STDOUT)
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"started\n"
            process.send_signal(signal.SIGTERM)
            assert await process.stdout.readline() == b"draining\n"
            process.send_signal(second)
            status, logged = await process.ended()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert status == 128 + second
    assert f"terminated by a second {second.name}" in logged
