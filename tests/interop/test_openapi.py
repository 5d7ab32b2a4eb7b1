"""Tests of the OpenAPI document: it is valid, and schemathesis gets the described responses."""

import re
import subprocess
from pathlib import Path

import httpx
import pytest
from interop.drivers import HERE, python_programs
from interop.tools import ANSWER_S_MAX
from running_servers import Running

CONFIG = HERE / "openapi" / "schemathesis.toml"
REQUESTS_S_MAX = (10, 60, 300)
"""Seconds of each attempt. The next follows if too few requests ran because other work has the
cores."""
REQUESTS_MIN = 100
PROGRAM_S_MAX = 600
OPTIONS = (
    "--phases=examples,coverage,fuzzing",
    "--generation-deterministic",
    "--continue-on-failure",
    "--no-color",
    f"--request-timeout={ANSWER_S_MAX}",
)


@pytest.fixture(scope="module")
def programs() -> Path:
    return python_programs("openapi")


def run(program: Path, *arguments: object, folder: Path) -> str:
    """Runs a program that must succeed, and returns its output."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PROGRAM_S_MAX, cwd=folder
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def test_openapi_document_is_valid(programs: Path, server: Running, tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    document.write_bytes(httpx.get(f"{server.http}/openapi.json", timeout=ANSWER_S_MAX).content)
    assert "OK" in run(programs / "openapi-spec-validator", document, folder=tmp_path)


def test_responses_conform_to_the_openapi_document(
    programs: Path, server: Running, tmp_path: Path
) -> None:
    """Sends requests that match the document, that nearly match it, and arbitrary ones."""
    url = f"{server.http}/openapi.json"

    def generated(seconds: int) -> int:
        """Returns the number of requests that ran in time; all responses are as described."""
        arguments = ("--config-file", CONFIG, "run", url, *OPTIONS, f"--max-time={seconds}")
        output = run(programs / "schemathesis", *arguments, folder=tmp_path)
        match = re.search(r"(\d+) generated", output)
        assert match is not None, output
        return int(match[1])

    assert any(generated(seconds) > REQUESTS_MIN for seconds in REQUESTS_S_MAX)
    ready = httpx.get(f"{server.http}/health/ready", timeout=ANSWER_S_MAX)
    assert ready.status_code == 200
