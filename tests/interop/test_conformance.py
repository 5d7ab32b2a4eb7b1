"""Tests of the conformance script: our server passes, and it names the faults of another one."""

import subprocess
import sys
from pathlib import Path

import pytest
from interop.lookups import SHARED_MEMORY
from running_servers import Running

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "conformance" / "open_inference.py"
RUN_S_MAX = 600


def run_script(http: str, grpc: str, model: str) -> subprocess.CompletedProcess[str]:
    arguments = ("--http", http, "--grpc", grpc, "--model", model, "--shared-memory", SHARED_MEMORY)
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=RUN_S_MAX
    )


def test_conformance_script_passes_for_our_server(server: Running) -> None:
    done = run_script(server.http.removeprefix("http://"), server.grpc, "shop")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == len(done.stdout.splitlines()) - 1 > 16


@pytest.mark.parametrize("model", ["nothing"])
def test_conformance_script_reports_failed_clauses(server: Running, model: str) -> None:
    done = run_script(server.http.removeprefix("http://"), server.grpc, model)
    assert done.returncode == 1, done.stderr
    assert "model_ready" in done.stdout
    assert "FAILED: /v2/models/nothing/ready is answered 404" in done.stdout
    assert "server_metadata" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[0].endswith(": ok")
