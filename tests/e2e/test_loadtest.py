"""Tests of short locust runs in processes, against a real server of the demo model."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from code_forker import CodeForker, start_code_forker
from e2e.demo_server import Demo
from running_servers import ANSWER_S_MAX, Running, is_running, running

RUN_S_MAX = 300
LONG_TIMEOUT = ("--timeout-s", ANSWER_S_MAX)
STEP_S = (3, 20)
"""Seconds of a step: one as usual, one in which even a busy machine responds."""
DELAY_MS = 20
"""Milliseconds that a server waits before each batch, so that few users leave the cores idle."""
POLL_S = 0.1
GARBAGE_MIN = 100
"""Malformed responses after which a load test ends."""
COMPLETED = re.compile(r'^embedserve_requests_total\{.*outcome="(\w+)".*\} (\S+)$', re.MULTILINE)
"""Matches a count of /metrics. Parsing all lines would load a core of a test that polls."""
LOADTEST = Path(__file__).parents[2] / "clients" / "loadtest"
IMPORT_LOCUST = "import locust.main"
RUN_LOCUST = f"""
import runpy, signal

signal.alarm({RUN_S_MAX})
runpy.run_module("locust", run_name="__main__", alter_sys=True)
"""
Locust = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def overloaded_server(demo: Demo, tmp_path: Path) -> Iterator[Running]:
    """Runs a server whose queue is full as soon as one example waits."""
    with running(demo.store, tmp_path / "log", "--queue-examples-max", 1) as server:
        yield server


def locust_arguments(scripts: str, host: str, *arguments: object) -> list[str]:
    """Returns the arguments of a headless run, for example of "rest.py,steps.py"."""
    files = ",".join(str(LOADTEST / name) for name in scripts.split(","))
    return ["-f", files, "--headless", "--json", "--host", host, *map(str, arguments)]


@pytest.fixture(scope="module")
def forker() -> Iterator[CodeForker]:
    """Starts a process that has imported locust, which takes a second."""
    with start_code_forker(IMPORT_LOCUST) as one:
        yield one


@pytest.fixture
def locust(forker: CodeForker, tmp_path: Path) -> Locust:
    """Returns a function that runs locust to its end, or until ``is_done`` returns true.

    The run may take up to RUN_S_MAX.
    """
    output = tmp_path / "stdout", tmp_path / "stderr"

    def run(
        scripts: str, host: str, *arguments: object, is_done: Callable[[], bool] | None = None
    ) -> subprocess.CompletedProcess[str]:
        for file in output:
            file.write_text("")
        words = locust_arguments(scripts, host, *arguments)
        pid = forker.start(RUN_LOCUST, *words, files=[*map(str, output)])
        if is_done:
            while is_running(pid) and not is_done():
                time.sleep(POLL_S)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return subprocess.CompletedProcess(
            words, forker.wait(), *[one.read_text() for one in output]
        )

    return run


def completed_requests(server: Running) -> Counter[str]:
    """Returns the number of completed requests of a server, by outcome."""
    outcomes: Counter[str] = Counter()
    for outcome, count in COMPLETED.findall(server.metrics()):
        outcomes[outcome] += int(float(count))
    return outcomes


def completes(server: Running, expected_counts: dict[str, int]) -> Callable[[], bool]:
    """Returns a function that returns whether the server has completed ``expected_counts`` further
    requests by outcome."""
    before = completed_requests(server)

    def is_done() -> bool:
        more = completed_requests(server) - before
        return all(more[outcome] >= count for outcome, count in expected_counts.items())

    return is_done


def requests_and_failures(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[int, int]]:
    """Returns (requests, failures) by name."""
    rows = json.loads(done.stdout)
    return {row["name"]: (row["num_requests"], row["num_failures"]) for row in rows}


@pytest.mark.parametrize(
    ("script", "ways"), [("rest.py", ("JSON", "protobuf")), ("grpc_user.py", ("unary", "stream"))]
)
def test_requests_of_all_sizes_are_completed(
    demo: Demo, locust: Locust, script: str, ways: tuple[str, ...]
) -> None:
    http = demo.server.http.removeprefix("http://")
    host = http if script == "rest.py" else demo.server.grpc
    load = ("-u", 4, "-r", 4, "--sizes", "1:8,50:1,500:1", *LONG_TIMEOUT)
    vocabularies = ("--vocabularies", demo.vocabularies)
    is_done = completes(demo.server, {"OK": 300})
    done = locust(script, host, *load, *vocabularies, is_done=is_done)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert [line for line in warnings if "CPU usage" not in line] == []
    rows = requests_and_failures(done)
    sizes = ("1 example", "50 examples", "500 examples")
    assert set(rows) == {f"{way}, {size}" for way in ways for size in sizes}
    assert all(requests and not failures for requests, failures in rows.values())


def test_rejected_requests_have_separate_statistics_rows(
    overloaded_server: Running, locust: Locust
) -> None:
    load = ("-u", 8, "-r", 8, "--sizes", "1:1", "--stream-depth", 4, *LONG_TIMEOUT)
    expected_counts = {"OK": 100, "RESOURCE_EXHAUSTED": 1}
    for script, host in (
        ("rest.py", overloaded_server.http),
        ("grpc_user.py", overloaded_server.grpc),
    ):
        is_done = completes(overloaded_server, expected_counts)
        done = locust(script, host, *load, is_done=is_done)
        assert done.returncode == 1
        rows = requests_and_failures(done)
        rejected = {name: row for name, row in rows.items() if name.endswith(", refused")}
        assert rejected
        assert all(requests == failures for requests, failures in rejected.values())
        assert not any(rows[name][1] for name in rows.keys() - rejected.keys())


class GarbageServer(ThreadingHTTPServer):
    """Counts the lookups that its GarbageHandler responds to."""

    lookups = 0


class GarbageHandler(BaseHTTPRequestHandler):
    """Lists one model, and responds to its lookups with bytes that are no message."""

    def do_GET(self) -> None:
        table = {"name": "t", "num_embeddings": 9, "features": ["user"]}
        model = {"model": "shop", "version": 1, "features": ["user"], "tables": [table]}
        models = {"models": [model], "default_model": "shop"}
        self.respond("application/json", json.dumps(models).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.respond("application/x-protobuf", b"\xff")
        assert isinstance(self.server, GarbageServer)
        self.server.lookups += 1

    def respond(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_malformed_responses_are_counted_as_failures(locust: Locust) -> None:
    with GarbageServer(("127.0.0.1", 0), GarbageHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        host = f"http://127.0.0.1:{server.server_port}"
        load = ("-u", 1, "--sizes", "1:1", "--tags", "protobuf")
        done = locust("rest.py", host, *load, is_done=lambda: server.lookups >= GARBAGE_MIN)
        server.shutdown()
        thread.join()
    (requests, failures) = requests_and_failures(done)["protobuf, 1 example"]
    assert requests == failures > 0
    assert "Traceback" not in done.stderr


def test_load_steps_add_users_and_end(demo: Demo, locust: Locust, tmp_path: Path) -> None:
    with running(demo.store, tmp_path / "log", "--delay-ms-max", DELAY_MS) as server:
        for step_s in STEP_S:
            shape = ("--step-users", 2, "--step-s", step_s, "--steps", 2, *LONG_TIMEOUT)
            done = locust("rest.py,steps.py", server.http, *shape, "--tags", "protobuf")
            assert done.returncode == 0, done.stderr
            found = re.findall(r"step of (\d+) users: (\S+) requests/s", done.stderr)
            assert [users for users, _ in found] == ["2", "4"]
            rates = [float(rate) for _, rate in found]
            if all(rates):
                break
    assert all(rates)
    assert {name.split(",")[0] for name in requests_and_failures(done)} == {"protobuf"}


def test_too_short_steps_are_rejected(demo: Demo, locust: Locust) -> None:
    done = locust("rest.py,steps.py", demo.server.http, "--step-s", 2)
    assert done.returncode == 1
    assert "the load test cannot run: --step-s: 2.0 is less than 3.0" in done.stderr


def test_invalid_options_end_the_load_test_with_a_reason(demo: Demo, locust: Locust) -> None:
    """Checks one error of the options; tests/client/test_loadtest.py checks the others."""
    done = locust("rest.py", demo.server.http, "-t", "5m", "--timeout-s", 0)
    assert done.returncode == 1
    assert "the load test cannot run: --timeout-s: 0.0 is not positive" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["rest.py", "grpc_user.py"])
def test_missing_server_ends_the_load_test_with_a_reason(script: str, locust: Locust) -> None:
    target = "127.0.0.1:1"
    done = locust(script, target if script == "grpc_user.py" else f"http://{target}", "-t", "5m")
    assert done.returncode == 1
    assert "the load test cannot run: " in done.stderr
    assert "Traceback" not in done.stderr


def test_web_form_has_the_arguments_and_their_defaults(
    forker: CodeForker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import json, steps; from locust.argument_parser import ui_extra_args_dict as form; "
        "print(json.dumps({name: field['default_value'] for name, field in form([]).items()}))"
    )
    output = tmp_path / "stdout"
    output.touch()
    monkeypatch.chdir(LOADTEST)
    assert forker.run(script, files=[str(output), os.devnull]) == 0
    assert json.loads(output.read_text()) == {
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
