"""CPU time of the server per request, by wire format.

    PYTHONPATH=bench python bench/experiments/wire_formats.py \\
        [--workload bulk] [--rounds 15] [--requests 20]

A server on core 0 serves one client on core 1, which sends one request after another and reads
every response completely. Formats take turns. The reported ratio is the median, over rounds, of a
format's time divided by protobuf's time in the same round. Other work on the machine thus affects
all formats alike. CPU time covers all threads of the server, including kernel time for its sockets.
"""

from __future__ import annotations

import argparse
import http.client
import os
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
import pyarrow as pa
from processes import cpu_seconds
from running import PORT, SERVER_CORE, running
from servers.embedserve import MESSAGE, PROTOBUF, EmbedServe
from workloads import Request, Workload, workload

CLIENT_CORE = 1
WARM_REQUESTS = 10
ARROW = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True)
class Form:
    """A wire format of requests.

    Attributes:
        dtype: dtype of the ids in Arrow columns; None for protobuf.
        options: response options, sent as schema metadata.
    """

    name: str
    dtype: type[np.integer] | None = None
    options: Mapping[str, str] | None = None

    @property
    def content_type(self) -> str:
        return PROTOBUF if self.dtype is None else ARROW

    def body(self, work: Workload, request: Request) -> bytes:
        if self.dtype is None:
            return EmbedServe().body(MESSAGE, work, request)
        table = columns(work, request, self.dtype).replace_schema_metadata(self.options)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        body: bytes = sink.getvalue().to_pybytes()
        return body


REFERENCE = Form("protobuf")
FORMS = (
    REFERENCE,
    Form("Arrow", np.int64),
    Form("Arrow, ids of int32", np.int32),
    Form("Arrow, a column for each key", np.int64, {"embedserve.columns": "keys"}),
)


def columns(work: Workload, request: Request, dtype: type[np.integer]) -> pa.Table:
    """Returns a table with a list of ids for each feature and example."""
    arrays = {}
    for feature, (ids, lengths) in zip(work.tables.features, request.per_feature(), strict=True):
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        arrays[feature] = pa.ListArray.from_arrays(offsets, ids.astype(dtype))
    return pa.table(arrays)


def values_of(form: Form, work: Workload, answer: bytes) -> np.ndarray:
    """Returns the values of a response, float32 [examples, all dims]."""
    if form.dtype is None:
        return EmbedServe().values(MESSAGE, work, answer)
    table = pa.ipc.open_stream(answer).read_all().combine_chunks()
    arrays = [one.chunk(0) for one in table.columns]
    flat = [one.flatten().to_numpy().reshape(len(one), -1) for one in arrays]
    return np.concatenate(flat, axis=1)


class WireClient:
    """One connection, and the bodies in one format."""

    def __init__(self, form: Form, work: Workload) -> None:
        self.form = form
        self._bodies = [form.body(work, request) for request in work.requests]
        self._client = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)

    def ask(self, at: int) -> bytes:
        body = self._bodies[at % len(self._bodies)]
        self._client.request("POST", "/embed", body, {"Content-Type": self.form.content_type})
        answer = self._client.getresponse()
        content = answer.read()
        assert answer.status == 200, content[:500]
        return content


def measure(pid: int, asker: WireClient, requests: int) -> float:
    """Returns the server's CPU milliseconds per request."""
    before_s = cpu_seconds(pid)
    for at in range(requests):
        asker.ask(at)
    return (cpu_seconds(pid) - before_s) / requests * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time of a request, by its form.")
    parser.add_argument("--workload", default="bulk", choices=("small", "rank", "bulk"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=20, help="of each form in a round")
    chosen = parser.parse_args()
    work = workload(chosen.workload, "uniform")
    work.tables.make()
    os.sched_setaffinity(0, {CLIENT_CORE})
    with running(EmbedServe(), work, SERVER_CORE) as server:
        askers = [WireClient(form, work) for form in FORMS]
        check(askers, work)
        taken: dict[str, list[float]] = {form.name: [] for form in FORMS}
        for turn in range(chosen.rounds):
            for at in range(len(askers)):
                asker = askers[(turn + at) % len(askers)]
                taken[asker.form.name].append(measure(server.pid, asker, chosen.requests))
    reference = taken[REFERENCE.name]
    for name, all_ms in taken.items():
        ratio = median(one / of for one, of in zip(all_ms, reference, strict=True))
        print(f"{name:30} best {min(all_ms):8.3f}, median {median(all_ms):8.3f} ms, "
              f"{ratio:.3f} of protobuf's")  # fmt: skip


def check(askers: list[WireClient], work: Workload) -> None:
    """Checks that all formats get the same values, and warms them up."""
    expected = values_of(REFERENCE, work, askers[0].ask(0))
    for asker in askers:
        for at in range(WARM_REQUESTS):
            asker.ask(at)
        assert np.array_equal(values_of(asker.form, work, asker.ask(0)), expected), asker.form.name


if __name__ == "__main__":
    main()
