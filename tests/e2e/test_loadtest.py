"""Short locust runs, in processes of their own, against the real server with the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers import Running, free_port, run_command, running

LOADTEST = Path(__file__).parents[2] / "clients" / "loadtest"


@dataclass(frozen=True)
class Demo:
    folder: Path
    server: Running

    @property
    def vocabularies(self) -> str:
        return ",".join(f"{table}={self.folder}/demo.{table}.txt" for table in ("movie", "user"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("loadtest")
    done = run_command("demo", folder / "store", "--checkpoint", folder / "demo.pt")
    assert done.returncode == 0, done.stderr
    with running(folder / "store", folder / "log") as server:
        yield Demo(folder, server)


@pytest.fixture
def full(demo: Demo, tmp_path: Path) -> Iterator[Running]:
    """A server whose queue is full as soon as one example waits."""
    with running(demo.folder / "store", tmp_path / "log", "--queue-examples-max", 1) as server:
        yield server


def locust(scripts: str, host: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A headless run of "rest.py,steps.py" and the like."""
    files = ",".join(str(LOADTEST / name) for name in scripts.split(","))
    options = ("--headless", "--json", "--host", host, *map(str, arguments))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "locust", "-f", files, *options],
        capture_output=True,
        text=True,
        timeout=60,
    )


def counted(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[int, int]]:
    """Requests and failures by name."""
    rows = json.loads(done.stdout)
    return {row["name"]: (row["num_requests"], row["num_failures"]) for row in rows}


@pytest.mark.parametrize(
    ("script", "ways"), [("rest.py", ("JSON", "protobuf")), ("grpc_user.py", ("unary", "stream"))]
)
def test_requests_of_all_sizes_are_answered(demo: Demo, script: str, ways: tuple[str, ...]) -> None:
    host = demo.server.http if script == "rest.py" else demo.server.grpc
    load = ("-u", 4, "-r", 4, "-t", "3s", "--sizes", "1:8,50:1,500:1")
    done = locust(script, host, *load, "--vocabularies", demo.vocabularies)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    rows = counted(done)
    sizes = ("1 example", "50 examples", "500 examples")
    assert set(rows) == {f"{way}, {size}" for way in ways for size in sizes}
    assert all(requests and not failures for requests, failures in rows.values())


def test_refused_requests_have_rows_of_their_own(full: Running) -> None:
    load = ("-u", 8, "-r", 8, "-t", "2s", "--sizes", "1:1", "--stream-depth", 4)
    for script, host in (("rest.py", full.http), ("grpc_user.py", full.grpc)):
        done = locust(script, host, *load)
        assert done.returncode == 1
        rows = counted(done)
        refused = {name: row for name, row in rows.items() if name.endswith(", refused")}
        assert refused
        assert all(requests == failures for requests, failures in refused.values())
        assert not any(rows[name][1] for name in rows.keys() - refused.keys())


def test_steps_add_users_and_end(demo: Demo) -> None:
    shape = ("--step-users", 2, "--step-s", 3, "--steps", 2)
    done = locust("rest.py,steps.py", demo.server.http, *shape, "--tags", "protobuf")
    assert done.returncode == 0, done.stderr
    said = [
        line.partition("step of ")[2] for line in done.stderr.splitlines() if "step of " in line
    ]
    assert [line.split(":")[0] for line in said] == ["2 users", "4 users"]
    assert all(float(line.split()[2]) > 0 for line in said)
    assert {name.split(",")[0] for name in counted(done)} == {"protobuf"}


def test_too_short_steps_are_refused(demo: Demo) -> None:
    done = locust("rest.py,steps.py", demo.server.http, "--step-s", 2)
    assert done.returncode == 1
    assert "the load test cannot run: --step-s: 2.0 is less than 3.0" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "many"), "--sizes: 'many' is not EXAMPLES:WEIGHT"),
        (("--model", "other"), "--model: 'other' is not served; there are movies"),
        (("--timeout-s", "0"), "--timeout-s: 0.0 is not positive"),
    ],
)
def test_a_test_that_cannot_run_says_why_and_ends(
    demo: Demo, arguments: tuple[str, ...], message: str
) -> None:
    done = locust("rest.py", demo.server.http, "-t", "5m", *arguments)
    assert done.returncode == 1
    assert f"the load test cannot run: {message}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["rest.py", "grpc_user.py"])
def test_a_server_that_is_not_there_is_said(script: str) -> None:
    target = f"127.0.0.1:{free_port()}"
    done = locust(script, target if script == "grpc_user.py" else f"http://{target}", "-t", "5m")
    assert done.returncode == 1
    assert "the load test cannot run: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_web_form_has_the_arguments() -> None:
    script = (
        "import json, steps; from locust.argument_parser import ui_extra_args_dict as form; "
        "print(json.dumps({name: field['default_value'] for name, field in form([]).items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=LOADTEST,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "sizes": "1:90,50:9,500:1",
        "ids_max": 8,
        "zipf": 1.05,
        "model": "",
        "vocabularies": "",
        "stream_depth": 8,
        "timeout_s": 10.0,
        "seed": 0,
        "step_users": 8,
        "step_s": 20.0,
        "steps": 6,
    }
