"""Tests of descriptor limits: they suffice for the connections, or connections leave some for
files."""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest
from server.async_popen import start_python
from server.python import run_python
from server.raw_http import get, read_response
from server.waiting import WAIT_S_MAX, until

from embedserve.access.grants import new_token

RESERVED = """
import resource, sys
from embedserve.config import Limits, ServeSettings
from embedserve.processes.startup.descriptors import reserve_descriptors
soft, hard, connections, is_sandbox = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
def forbid(*arguments):
    raise ValueError("not allowed to raise maximum limit")
if is_sandbox:  # where the module resource raises ValueError for EPERM
    resource.setrlimit = forbid
settings = ServeSettings(store="", limits=Limits(connections_max=connections))
limits = reserve_descriptors(settings).limits
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], limits.connections_max)
"""
SERVE = """
import resource, sys
from embedserve.commands.cli import app
hard, *arguments = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(hard), int(hard)))
app(["serve", *arguments])
"""
HARD = 256


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "is_sandbox", "expected"),
    [
        (256, 8192, 4000, False, "6048 4000"),
        (256, 4096, 16_384, False, "4096 2048"),
        (4096, 8192, 1000, False, "4096 1000"),  # a sufficient limit stays
        (256, 256, 16_384, False, "256 128"),
        (256, 256, 100, False, "256 100"),
        (256, 4096, 1000, True, "256 128"),
    ],
)
def test_descriptor_limit_is_raised_or_bounds_connections(
    soft: int, hard: int, connections: int, is_sandbox: bool, expected: str
) -> None:
    done = run_python("-c", RESERVED, *map(str, (soft, hard, connections, int(is_sandbox))))
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
    limit, accepted = map(int, expected.split())
    if accepted == connections:
        assert done.stderr == ""
        return
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"connections_max is {connections}, but a process may have {limit} file descriptors: it "
        f"accepts {accepted} connections"
    )


@pytest.mark.usefixtures("warm")
async def test_files_are_read_while_connections_are_at_their_limit(
    store: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps({"name": "other", "certificate": "other"}))
    token, sha256 = new_token()
    options = ("--http-port", "0", "--grpc-port", "0", "--tokens", tokens)
    process = await start_python("-c", SERVE, HARD, store, *options, stderr=subprocess.STDOUT)
    log = bytearray()

    async def read_log() -> None:
        while chunk := await process.stdout.read(4096):
            log.extend(chunk)

    async def status() -> int:
        reader, writer = clients[0]
        writer.write(get("/models", f"Authorization: Bearer {token}"))
        return (await read_response(reader))[0]

    reading = asyncio.create_task(read_log())
    clients: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        await until(lambda: b"try:" in log)
        found = re.search(rb"REST http://\S+:(\d+)", log)
        assert found is not None, log.decode()
        clients += [
            await asyncio.open_connection("127.0.0.1", int(found[1])) for _ in range(HARD + 20)
        ]
        assert await status() == 401
        await until(lambda: b"new connections are closed: there are connections_max, 128" in log)
        tokens.write_text(json.dumps({"name": "ranker", "sha256": sha256}))
        async with asyncio.timeout(WAIT_S_MAX):
            while await status() == 401:  # noqa: ASYNC110  the server's poll has no event here
                await asyncio.sleep(0.1)
        assert b"connections_max is 16384, but a process may have 256 file descriptors" in log
    finally:
        for _, writer in clients:
            writer.transport.abort()
        process.kill()
        await process.wait()
        await reading
