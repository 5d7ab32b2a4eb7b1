"""Tests of `embedserve health`: 0 if the server on this host responds, else one line with the
reason."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import Authority
from server.live import serving
from server.python import run_python
from server.raw_http import OurServer
from server.waiting import WAIT_S_MAX
from typer.testing import CliRunner

from embedserve.commands import health
from embedserve.commands.cli import app
from embedserve.pipeline import RequestPipeline
from embedserve.wire.tls.certificates import Certificates, TlsFiles


@pytest.fixture(autouse=True)
def long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the command's timeout, for a server on a busy machine."""
    monkeypatch.setattr(health, "TIMEOUT_S", WAIT_S_MAX)


async def run_health(port: int, *options: str, **settings: str) -> tuple[int, str]:
    """Runs the command with the server's settings as variables; returns (exit status, output)."""
    variables = {"EMBEDSERVE_HTTP_PORT": str(port), "EMBEDSERVE_HOST": "0.0.0.0", **settings}
    done = await asyncio.to_thread(CliRunner().invoke, app, ["health", *options], env=variables)
    return done.exit_code, done.output


def test_probe_imports_no_event_loop_and_no_numpy() -> None:
    """Guards the CPU time of a probe, which runs every few seconds."""
    code = (
        "import sys\n"
        "from embedserve.commands.cli import app\n"
        "try:\n"
        "    app(['health', '--http-port', '1'])\n"
        "except SystemExit:\n"
        "    print(*{'asyncio', 'numpy', 'torch'}.intersection(sys.modules))\n"
    )
    assert run_python("-c", code).stdout == "\n"


async def test_exit_status_distinguishes_live_from_ready(
    pipeline: RequestPipeline, tmp_path: Path
) -> None:
    path = str(tmp_path / "http.sock")
    async with serving(pipeline, unix=[path]) as live:
        at: dict[int, dict[str, str]] = {live.http_port: {}, 1: {"EMBEDSERVE_HTTP_UDS": path}}
        for port, more in at.items():
            pipeline.models.not_ready = ""
            assert await run_health(port, **more) == (0, "")
            assert await run_health(port, "--ready", **more) == (0, "")
            pipeline.models.not_ready = "draining"
            assert await run_health(port, **more) == (0, "")
            status, output = await run_health(port, "--ready", **more)
            assert status == 1
            assert "/health/ready: answered 503: draining" in output
            assert len(output.splitlines()) == 1


async def test_health_over_tls_and_with_required_client_certificates(
    pipeline: RequestPipeline, tmp_path: Path
) -> None:
    authority = Authority()
    pair = map(str, authority.sign("server").write(tmp_path, "server"))
    files = TlsFiles(*pair)
    root = tmp_path / "root.pem"
    root.write_bytes(authority.root)
    over_tls = {"EMBEDSERVE_TLS_CERT": files.certificate}
    for used in (files, replace(files, client_ca=str(root))):
        async with OurServer(pipeline, Certificates(used)) as server:
            assert await run_health(server.port, **over_tls) == (0, "")
            status, output = await run_health(server.port)
            assert (status, "answered 400: this port takes TLS only" in output) == (1, True)
            status, output = await run_health(server.port, "--ready", **over_tls)
            assert status == int(bool(used.client_ca))
            assert ("it requires a client certificate" in output) == bool(used.client_ca)
    async with OurServer(pipeline) as server:
        status, output = await run_health(server.port, **over_tls)
    assert status == 1
    assert "SSL" in output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--http-port", "1"], "Connection refused"),
        (["--http-uds", "/nowhere/http.sock"], "unix:/nowhere/http.sock: /health/live: [Errno 2]"),
        (["--host", "?"], "url is 'http://?:8000', expected such as"),
    ],
)
def test_unreachable_server_prints_one_error_line(options: list[str], why: str) -> None:
    done = CliRunner().invoke(app, ["health", *options])
    assert done.exit_code == 1
    assert why in done.output
    assert len(done.output.splitlines()) == 1
