"""Tests of several workers: one is killed under load, all drain, and they share memory."""

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from running_servers import ANSWER_S_MAX, Running, run_commands, running
from waits import wait_until

from embedserve_client import EmbedClient
from embedserve_store import TableSpec, publish

ROWS, DIM = 100_000, 32
TABLE_BYTES = ROWS * DIM * 4
HUGE_PAGE_BYTES = 2 << 20
PRIVATE_BYTES_MAX = 450 << 20
"""Private memory of a worker, in bytes: the cost of Python, torch and the model."""
RESTART_S_MAX = 300
CLIENTS = 8
PAUSE_S, SCRAPE_S = 0.02, 0.1
BODY = b'{"features": {"user": [[1, 2], [499]]}}'


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, weight: torch.Tensor) -> Path:
    store = tmp_path_factory.mktemp("workers") / "store"
    tables = [TableSpec("user", ROWS, DIM, ("user",), "sum", "float32")]
    publish({"ebc.embedding_bags.user.weight": weight}, store, model="m", tables=tables)
    return store


def counters(text: str) -> dict[str, float]:
    """Returns all samples of /metrics that may only grow."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


def root_cause(error: BaseException) -> BaseException:
    before = error.__cause__ or error.__context__
    return error if before is None else root_cause(before)


class Load:
    """Clients that send one request after another, each over its own connection, without retries.

    They run as long as the server, and count the outcomes. They pause between requests, so that a
    starting worker gets the cores.
    """

    def __init__(self, server: Running) -> None:
        self.outcomes: Counter[str] = Counter()
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send_requests) for _ in range(CLIENTS)]

    def _send_requests(self) -> None:
        with httpx.Client(base_url=self._server.http, verify=False, timeout=ANSWER_S_MAX) as client:
            # After the server has ended, another process may listen on its port.
            while not self._stop.is_set() and self._server.process.poll() is None:
                try:
                    outcome = str(client.post("/embed", content=BODY).status_code)
                except httpx.ConnectError as error:
                    # Otherwise the listener that had accepted the connection died.
                    is_refused = isinstance(root_cause(error), ConnectionRefusedError)
                    outcome = "refused" if is_refused else "lost"
                except httpx.TransportError:
                    outcome = "lost"
                self.outcomes[outcome] += 1
                if outcome == "refused" or self._stop.wait(PAUSE_S):
                    return

    def wait_for_ok_responses(self, ok_count: int) -> None:
        wait_until(lambda: self.outcomes["200"] >= ok_count, lambda: self.outcomes)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=RESTART_S_MAX)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.join()


def scrapes(server: Running) -> Iterator[str]:
    """Yields the metrics over new connections, which any worker may accept."""
    end = time.monotonic() + RESTART_S_MAX
    while time.monotonic() < end:
        try:
            yield server.metrics()
        except httpx.TransportError:  # that worker was just killed
            continue
        time.sleep(SCRAPE_S)
    raise AssertionError(f"the worker did not come back: {server.log.read_text()}")


def test_killed_worker_loses_only_its_requests_in_flight_and_restarts(
    store: Path, tmp_path: Path
) -> None:
    with running(store, tmp_path / "log", "--workers", 2) as server, Load(server) as load:
        load.wait_for_ok_responses(500)
        first, second = server.children()
        before: dict[str, float] = {}
        os.kill(first, signal.SIGKILL)
        for text in scrapes(server):
            now = counters(text)
            assert [name for name in before if now[name] < before[name]] == []
            before = now
            is_replaced = "embedserve_worker_restarts_total 1.0" in text
            if is_replaced and "embedserve_workers 2.0" in text:
                break
        load.wait_for_ok_responses(load.outcomes["200"] + 500)
        assert second in server.children()
        assert first not in server.children()
    # A client has one request in flight, and its next one may meet the dying socket.
    assert set(load.outcomes) <= {"200", "lost"}
    assert load.outcomes["lost"] <= 2 * CLIENTS
    assert f"worker 0 (process {first}) was ended by SIGKILL: restarted" in server.log.read_text()


def test_sigterm_drains_all_workers(store: Path, tmp_path: Path) -> None:
    """Checks a server that starts as from a shell, where each worker imports torch."""
    with (
        running(store, tmp_path / "log", "--workers", 2, is_warm=False) as server,
        Load(server) as load,
    ):
        load.wait_for_ok_responses(500)
        server.process.terminate()
        load.join()
        assert server.process.wait(timeout=RESTART_S_MAX) == 0
    # Lost requests were sent to a connection just as it closed. No accepted request is lost, as
    # test_supervisor.py shows.
    assert set(load.outcomes) <= {"200", "refused", "lost"}
    assert load.outcomes["lost"] <= 2 * CLIENTS
    assert server.log.read_text().count("draining") == 2


@pytest.fixture(scope="module")
def resident(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ("--workers", 2, "--tables", "resident", "--verify")
    with running(store, tmp_path_factory.mktemp("resident") / "log", *options) as server:
        yield server


def test_second_server_on_the_same_ports_is_rejected(store: Path, resident: Running) -> None:
    http_port, grpc_port = resident.http.rpartition(":")[2], resident.grpc.rpartition(":")[2]
    cases = [
        (workers, option, other, port)
        for option, other, port in (
            ("--http-port", "--grpc-port", http_port),
            ("--grpc-port", "--http-port", grpc_port),
        )
        for workers in (1, 2)
    ]
    ended = run_commands(
        *(
            ("serve", store, "--workers", workers, option, port, other, 0)
            for workers, option, other, port in cases
        )
    )
    for (*_, port), done in zip(cases, ended, strict=True):
        assert done.returncode == 1
        assert f"embedserve: cannot listen on 127.0.0.1:{port}" in done.stderr


def memory_mappings(pid: int) -> list[dict[str, str]]:
    """Returns the mappings of a process: their fields, and their address range as "range"."""
    mappings: list[dict[str, str]] = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if re.fullmatch("[0-9a-f]+-[0-9a-f]+", first):
            mappings.append({"range": first})
        else:
            mappings[-1][first.rstrip(":")] = rest.strip()
    return mappings


def kib(field: str) -> int:
    return int(field.split()[0]) << 10


def test_workers_serve_resident_tables(resident: Running, weight: torch.Tensor) -> None:
    with EmbedClient(resident.http) as client:
        values = client.embed({"user": [[1, 2], [ROWS - 1]]}).values
    expected = torch.stack([weight[1] + weight[2], weight[ROWS - 1]])
    torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-6, atol=1e-6)
    assert resident.get("/info").json() | {"version": ""} == {
        "version": "",
        "workers": 2,
        "tables": "resident",
    }
    assert "12.2 MiB of tables are resident" in resident.log.read_text()


def test_workers_share_the_memory_of_resident_tables(resident: Running) -> None:
    workers = resident.children()
    # The supervisor's largest anonymous mapping with the huge page flag ("hg").
    table = max(
        (one for one in memory_mappings(resident.process.pid) if "hg" in one["VmFlags"].split()),
        key=lambda one: kib(one["Size"]),
    )["range"]
    found = [
        one
        for pid in (resident.process.pid, *workers)
        for one in memory_mappings(pid)
        if one["range"] == table
    ]
    assert len(found) == 3
    assert all(kib(one["Private_Dirty"]) == 0 for one in found)
    pss_bytes = sum(kib(one["Pss"]) for one in found)
    assert TABLE_BYTES <= pss_bytes <= TABLE_BYTES + 2 * HUGE_PAGE_BYTES
    for pid in workers:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        private = [kib(line.partition(":")[2]) for line in rollup if line[:8] == "Private_"]
        assert len(private) >= 2
        assert sum(private) < PRIVATE_BYTES_MAX


def test_invalid_worker_settings_are_rejected_in_one_line(store: Path) -> None:
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--workers", 2, "--devices", "cuda"), "workers is 2, but the tables go to GPUs"),
        (("--tables", "resident", "--devices", "cuda"), "tables is 'resident', but they are"),
        (("--tables", "rented"), "tables is 'rented', expected one of mapped, resident"),
        (("--workers", 2, "--devices", "tpu"), "devices is 'tpu'"),
    ]
    serve = ("serve", store, "--http-port", 0, "--grpc-port", 0)
    ended = run_commands(*((*serve, *options) for options, _ in cases))
    for (_, message), done in zip(cases, ended, strict=True):
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("embedserve: ")]
        assert message in line
