"""Measurements of `gpu_check`: loading, copies, the kernel, the engine, and a server over loopback.

Each step yields (measurement, result) rows, and compares some results with exact sums before it
measures.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gather_bandwidth
import kernel
import numpy as np
import torch
from load import quantile
from lookup_cases import mostly_zeros
from running_servers import running
from workloads import Request, Tables, Workload, workload

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.engine.attach_weights import attach_weights
from embedserve.engine.gpus import WORK_BYTES, gpus_for
from embedserve.engine.restore import restore
from embedserve.engine.sharded import shard_without_rows
from embedserve_client import GrpcEmbedClient
from embedserve_store import TableSpec
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.memory.available_memory import available_bytes

QUICK_TABLES = Tables("quick", 8, 1000, 64)
COPY_BYTES, QUICK_COPY_BYTES = 256 << 20, 8 << 20
COPIES = 5
CHECKED = 3
"""Results of a workload that are compared with exact sums."""
LARGE_BYTES, QUICK_LARGE_BYTES = 20 * 10**9, 10**6
"""Bytes of the table that is loaded onto a device."""
LARGE_DIM = 64
THREADS = (1, 2, 4)
DISTINCT_MAX = 8
"""Distinct requests of a workload that several threads send."""
ASKED_S, QUICK_ASKED_S = 5.0, 0.2
CALLERS = 8
CHANGED = 10_000
"""Rows of each table in a delta."""
CHANGED_BYTES = 1 << 30
UPLOADS = 25

Row = tuple[str, str]
"""(measurement, result)."""


@dataclass(frozen=True)
class CheckOptions:
    """Options of a check.

    Attributes:
        devices: value of `embedserve serve --devices`.
        folder: empty folder for output.
    """

    devices: str
    is_quick: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.devices == "cuda"

    @property
    def one_device(self) -> str:
        """The devices for measurements on one device."""
        return "cuda" if self.is_cuda else "cpu:1"

    def workloads(self, *ids: str) -> list[Workload]:
        if self.is_quick:
            return [Workload("small", QUICK_TABLES, one) for one in ids]
        return [workload(name, one) for name in ("small", "bulk") for one in ids]


def loading(asked: CheckOptions) -> Iterator[Row]:
    """Measures sharding a model and attaching its rows, which are copied to GPUs and mapped on the
    CPU."""
    device_type = asked.one_device.split(":")[0]
    for work in asked.workloads("uniform"):
        work.tables.make()
        of_work = kernel.version_of(work)
        of_work.tables.data[::4096].max()  # reads the rows into memory
        start = time.perf_counter()
        sharded = shard_without_rows(of_work, of_work.plan, device_type, is_weighted=False)
        attach_weights(sharded.module, of_work, device_type)
        seconds, nbytes = time.perf_counter() - start, of_work.manifest.nbytes
        yield (
            f"tables of {work.name}",
            f"{nbytes / 1e9:.2f} GB in {seconds:.2f} s, {nbytes / seconds / 1e9:.1f} GB/s",
        )


def a_large_table(asked: CheckOptions) -> Iterator[Row]:
    """Measures the time from a version to a warm engine, with 20 GB of zeros that take no disk
    space."""
    nbytes = QUICK_LARGE_BYTES if asked.is_quick else LARGE_BYTES
    what = f"{nbytes / 1e9:g} GB of float32"
    free_bytes = gpus_for(asked.devices).free_bytes
    if free_bytes and free_bytes[0] < nbytes + WORK_BYTES:
        yield what, "left out: they do not fit on a GPU"
        return
    table = TableSpec("large", nbytes // (4 * LARGE_DIM), LARGE_DIM, ("id",), "sum", "float32")
    last = {table.num_embeddings - 1: np.arange(LARGE_DIM, dtype=np.float32)}
    of_zeros = mostly_zeros(asked.folder / "large", table, last)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
    start = time.perf_counter()
    engine = restore(of_zeros, asked.one_device)
    seconds = time.perf_counter() - start
    values = engine.lookup(np.array(list(last)), np.ones(1, np.int32))
    np.testing.assert_array_equal(values, np.stack(list(last.values())))
    yield (
        what,
        f"warm after {seconds:.2f} s, {nbytes / seconds / 1e9:.1f} GB/s; this process held "
        f"{_most_held() / 1e9:.2f} GB at most",
    )


def _most_held() -> int:
    """Returns the peak bytes of this host's memory, including mapped files."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def copying(asked: CheckOptions) -> Iterator[Row]:
    """Measures copies between host and GPU memory, the upper bound for lookups."""
    nbytes = QUICK_COPY_BYTES if asked.is_quick else COPY_BYTES
    host = torch.ones(nbytes, dtype=torch.uint8)
    places = {"host": host}
    if asked.is_cuda:
        places |= {"pinned host": host.pin_memory(), "GPU": host.cuda()}
    for source_name, source in places.items():
        for target_name, target in places.items():
            if asked.is_cuda and "GPU" not in (source_name, target_name):
                continue
            other = torch.empty_like(target, pin_memory=target.is_pinned())
            rate = nbytes / _copy_seconds(source, other) / 1e9
            yield f"copy, {source_name} to {target_name}", f"{rate:.1f} GB/s"


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """Returns the seconds of the fastest of COPIES copies."""
    taken = []
    for _ in range(COPIES):
        start = time.perf_counter()
        target.copy_(source)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken)


def gathering_rows(asked: CheckOptions) -> Iterator[Row]:
    """Measures FBGEMM's kernel alone: rows of 256 bytes from a table that no cache holds."""
    size = gather_bandwidth.QUICK if asked.is_quick else gather_bandwidth.WHOLE
    free = gpus_for(asked.devices).free_bytes or (available_bytes(),)
    needed = 2 * size.table_bytes + size.gathered_bytes
    if free[0] < needed:
        yield "rows", f"left out: they need {needed / 1e9:.1f} GB, {free[0] / 1e9:.1f} are free"
        return
    yield from gather_bandwidth.gathered(torch.device("cuda:0" if asked.is_cuda else "cpu"), size)


def looking_up(asked: CheckOptions) -> Iterator[Row]:
    """Compares the kernel alone with the engine, on one device, and with a copy in host memory."""
    for work in asked.workloads("uniform", "zipf"):
        engine = restore(kernel.version_of(work), asked.one_device)
        for request in work.requests[:CHECKED]:
            work.check(request, engine.lookup(request.ids, request.lengths.reshape(-1)))
        del engine
        found = kernel.measure(work, asked.one_device, rounds=1 if asked.is_quick else 5)
        for name, ms in found.items():
            yield f"{work.name} {work.ids}, {name}", f"{ms:.4f} ms"


def several_at_once(asked: CheckOptions) -> Iterator[Row]:
    """Calls the engine from several threads, as the server does with two batches in flight."""
    for work in asked.workloads("uniform"):
        engine = restore(kernel.version_of(work), asked.one_device)
        inputs = [(one.ids, one.lengths.reshape(-1)) for one in work.requests[:DISTINCT_MAX]]
        expected = [engine.lookup(*one) for one in inputs]
        seconds = QUICK_ASKED_S if asked.is_quick else ASKED_S
        for threads in THREADS:
            with ThreadPoolExecutor(threads) as pool:
                running = [
                    pool.submit(_look_up_for, engine, inputs, expected, seconds)
                    for _ in range(threads)
                ]
                taken = [one for each in running for one in each.result()]
            rate, p50_us = len(taken) / seconds, statistics.median(taken) * 1e6
            yield f"{work.name}, {threads} at once", f"{rate:,.0f} lookups/s, p50 {p50_us:.0f} us"


def _look_up_for(
    engine: Any,
    inputs: Sequence[tuple[np.ndarray, np.ndarray]],
    expected: Sequence[np.ndarray],
    seconds: float,
) -> list[float]:
    """Looks up one input after another for ``seconds``, and checks the last result. Returns the
    seconds of each lookup."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        which = len(taken) % len(inputs)
        start = time.perf_counter()
        values = engine.lookup(*inputs[which])
        taken.append(time.perf_counter() - start)
    np.testing.assert_array_equal(values, expected[which])
    return taken


def uploading_deltas(asked: CheckOptions) -> Iterator[Row]:
    """Measures how long the rows of a delta take to the GPU, while a thread looks up."""
    what = f"{CHANGED:,} rows of each of {QUICK_TABLES.count} tables"
    if not asked.is_cuda:
        yield what, "left out: lookups read them in this host's memory"
        return
    work = asked.workloads("uniform")[0]
    live = LiveRows(kernel.version_of(work), CHANGED_BYTES, readers=1)
    engine = restore(live.version, asked.one_device, live=live)
    assert engine.spare_rows is not None
    reader = RowsReader(live, 0, engine.plan, engine.spare_rows.upload)
    request, random, ended = work.requests[0], np.random.default_rng(0), threading.Event()
    counts = request.lengths.reshape(len(live.version.manifest.features), -1).sum(axis=1)

    def look_up_always() -> None:
        while not ended.is_set():
            view, _ = reader.begin()
            numbers = reader.rows_in_view(request.ids, counts, view)
            engine.lookup(numbers, request.lengths.reshape(-1))
            reader.end(view)

    writer, taken = RowsWriter(live), []
    with ThreadPoolExecutor(1) as pool:
        lookups = pool.submit(look_up_always)
        try:
            for seq in range(1, UPLOADS + 1):
                writer.apply(seq, [_changed(one, random) for one in live.version.manifest.tables])
                start_s = time.perf_counter()
                reader.advance()
                taken.append(1e3 * (time.perf_counter() - start_s))
        finally:
            ended.set()
        lookups.result()
    least, most = min(taken), max(taken)
    yield what, f"p50 {statistics.median(taken):.1f} ms, {least:.1f} to {most:.1f}"


def _changed(table: TableSpec, random: np.random.Generator) -> ChangedRows:
    count = min(CHANGED, table.num_embeddings // 2)
    numbers = np.sort(random.choice(table.num_embeddings, count, replace=False))
    return ChangedRows(table, numbers, np.zeros((count, table.row_bytes), np.uint8))


def serving(asked: CheckOptions) -> Iterator[Row]:
    """Loads a server over loopback through gRPC, from one caller and then from several."""
    for work in asked.workloads("uniform"):
        log = asked.folder / f"{work.name}.log"
        store = work.tables.store
        with (
            running(store, log, "--devices", asked.devices, is_warm=False) as server,
            GrpcEmbedClient(server.grpc) as client,
        ):
            ask = _asking(client, work)
            for request in work.requests[:CHECKED]:
                work.check(request, ask(request))
            alone = _ask_for(ask, work, QUICK_ASKED_S if asked.is_quick else ASKED_S)
            yield f"{work.name}, one caller", f"p50 {statistics.median(alone) * 1e3:.3f} ms"
            yield f"{work.name}, {CALLERS} callers", _at_once(ask, work, asked)


def _asking(client: GrpcEmbedClient, work: Workload) -> Callable[[Request], Any]:
    def ask(request: Request) -> Any:
        features = zip(work.tables.features, request.per_feature(), strict=True)
        return client.embed(dict(features)).values

    return ask


def _ask_for(ask: Callable[[Request], Any], work: Workload, seconds: float) -> list[float]:
    """Sends one request after another for ``seconds``; returns the seconds of each."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        ask(work.requests[len(taken) % len(work.requests)])
        taken.append(time.perf_counter() - start)
    return taken


def _at_once(ask: Callable[[Request], Any], work: Workload, asked: CheckOptions) -> str:
    seconds = QUICK_ASKED_S if asked.is_quick else ASKED_S
    with ThreadPoolExecutor(CALLERS) as pool:
        of_all = list(pool.map(lambda _: _ask_for(ask, work, seconds), range(CALLERS)))
    taken = [one for of_one in of_all for one in of_one]
    p99 = quantile(taken, 0.99)
    rate = len(taken) / seconds
    answers = rate * work.answer_bytes / 1e9
    return f"{rate:,.0f} requests/s, {answers:.3f} GB/s of answers, p99 {p99 * 1e3:.3f} ms"
