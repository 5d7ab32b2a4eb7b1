"""Processes of shards and a router, and a client that checks the version of each response."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from running_servers import ANSWER_S_MAX, READY_S_MAX, Running, free_port, running

from embedserve_client import GrpcEmbedClient
from embedserve_client.errors import EmbedServeClientError
from embedserve_store import TableSpec, publish

PARTS = 2
WAIT_S_MAX = 120
PAUSE_S = 0.01
POLL_S = 0.1
SLOW_CALL_OPTIONS = ("--shard-timeout-ms", 60_000)
"""Options of a router with slow calls: other processes may use all cores meanwhile."""
SHARD_METRIC = re.compile("^embedserve_shard_|_total$")
"""Parts of a metric's name that ``shard_metrics`` removes."""
SHARD_LINES = re.compile(r"^(?:# (?:HELP|TYPE) )?embedserve_shard_.*\n", re.MULTILINE)
"""Lines of /metrics to parse. Parsing all would take most of the time of a test that polls."""


@dataclass
class Cluster:
    """Processes of shards and a router.

    Attributes:
        addresses: file of the shards' addresses.
        shards: (part, number of the replica) to the server.
        ports: (part, number of the replica) to its HTTP and gRPC ports, the same at every start.
    """

    store: Path
    folder: Path
    parts: int = PARTS
    stack: ExitStack = field(default_factory=ExitStack)
    shards: dict[tuple[int, int], Running] = field(default_factory=dict)
    ports: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def addresses(self) -> Path:
        return self.folder / "shards.json"

    def ports_of(self, part: int, replica: int = 0) -> tuple[int, int]:
        """Returns the ports of a shard, which stay the same when it is restarted."""
        return self.ports.setdefault((part, replica), (free_port(), free_port()))

    def start_shard(self, part: int, replica: int = 0, *arguments: object) -> Running:
        log = self.folder / f"shard-{part}-{replica}.log"
        options = ("--part", f"{part}/{self.parts}", *arguments)
        server = running(self.store, log, *options, ports_used=self.ports_of(part, replica))
        shard = self.shards[part, replica] = self.stack.enter_context(server)
        return shard

    def start_shards(self, *arguments: object, replicas: int = 1) -> None:
        """Starts the replicas of all parts, and writes their addresses."""
        for part in range(self.parts):
            for replica in range(replicas):
                self.start_shard(part, replica, *arguments)
        self.write_addresses()

    def start_router(self, *arguments: object) -> Running:
        log = self.folder / "router.log"
        options = ("--shards", f"file:{self.addresses}", *SLOW_CALL_OPTIONS, *arguments)
        return self.stack.enter_context(running(self.store, log, *options))

    def begin_router(self, *words: str) -> Callable[[], Running]:
        """Starts a router that cannot be ready yet, and returns once its log has all ``words``.

        The returned function waits until the router is ready.
        """
        started: list[Running] = []
        starting = threading.Thread(target=lambda: started.append(self.start_router()))
        starting.start()
        log = self.folder / "router.log"
        end = time.monotonic() + WAIT_S_MAX
        while not (log.exists() and all(one in log.read_text() for one in words)):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert not started

        def finish() -> Running:
            starting.join(READY_S_MAX)
            [router] = started
            return router

        return finish

    def write_addresses(self) -> None:
        found: dict[str, list[str]] = {str(part): [] for part in range(self.parts)}
        for (part, _), shard in sorted(self.shards.items()):
            found[str(part)].append(shard.grpc)
        part_written = self.addresses.with_suffix(".new")
        part_written.write_text(json.dumps(found))
        part_written.replace(self.addresses)


def shard_metrics(server: Running) -> dict[str, float]:
    """Returns the metrics of calls to parts, without buckets, by name, part and other label."""
    found = {}
    for family in text_string_to_metric_families("".join(SHARD_LINES.findall(server.metrics()))):
        for name, labels, value, *_ in family.samples:
            if "le" not in labels:
                part = labels.pop("part")
                found[" ".join([SHARD_METRIC.sub("", name), part, *labels.values()])] = value
    return found


def replicas(router: Running) -> list[float]:
    """Returns the number of joined replicas of each part of the version that is being served."""
    found = {}
    for name, value in shard_metrics(router).items():
        family, part, *others = name.split()
        if family == "replicas" and others[1] == "served":  # labels: model, state, version
            found[int(part)] = value
    return [found[part] for part in range(PARTS)]


def post_embed(server: Running, **features: Any) -> httpx.Response:
    """Sends a request for bags of features over REST."""
    body = {"features": features}
    return httpx.post(f"{server.http}/embed", json=body, timeout=ANSWER_S_MAX)


@contextmanager
def cluster(store: Path, folder: Path) -> Iterator[Cluster]:
    one = Cluster(store, folder)
    with one.stack:
        yield one


ROWS, DIM, STEP = 100, 8, 1000


def publish_next(store: Path, number: int) -> None:
    """Publishes version ``number``, in which every value of row r is number * STEP + r."""
    values = number * STEP + torch.arange(ROWS, dtype=torch.float32)
    spec = [TableSpec("user", ROWS, DIM, ("user",), "sum", "float32")]
    weights = {"embedding_bags.user.weight": values[:, None].repeat(1, DIM)}
    published = publish(weights, store, model="m", tables=spec, sharding="row_wise", hosts=PARTS)
    assert published.version == number


class Load:
    """A client that sends one request after another.

    It compares each response with the rows of the version that the response names.
    """

    def __init__(self, server: Running, rows: list[int]) -> None:
        self.answers: dict[int, int] = {}
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self._rows = rows
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with GrpcEmbedClient(self._server.grpc) as client:
            while not self._stop.is_set():
                try:
                    answer = client.embed({"user": [self._rows]}, timeout_s=ANSWER_S_MAX)
                except EmbedServeClientError as error:
                    self.failed.append(str(error))
                else:
                    self._record(answer)
                self._stop.wait(PAUSE_S)

    def _record(self, answer: Any) -> None:
        version = answer.version
        expected = sum(version * STEP + row for row in self._rows)
        if not (np.asarray(answer["user"]) == expected).all():
            self.wrong.append(f"version {version}: {answer['user'][0][:2]}, expected {expected}")
        self.answers[version] = self.answers.get(version, 0) + 1

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S_MAX
        while not is_true():
            assert time.monotonic() < end, (self.answers, self.failed[-3:])
            time.sleep(POLL_S)

    def wait_for_more(self, count: int = 50) -> None:
        """Waits for ``count`` further responses."""
        before = sum(self.answers.values())
        self.wait_for(lambda: sum(self.answers.values()) >= before + count)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


BOTH_PARTS = [3, 97]
