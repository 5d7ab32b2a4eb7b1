"""Latency of `bulk` for a caller on the same host: TCP, a Unix socket, or shared memory.

    PYTHONPATH=bench python bench/experiments/same_host.py [--rounds 3] [--seconds 3]

Triton is measured too if it is installed, and the kernel alone for reference. The server runs on
one core, the caller on the other, with one request after another. A round starts each server once,
and the ways take turns within it.

The results are medians, and the server's CPU time per request. CPU time is the better measure on a
machine with other work. All ways use the Open Inference Protocol over HTTP/1.1. Through shared
memory the ids are copied in before each request, and the vectors are not copied out.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kernel
import numpy as np
import running
from processes import cpu_seconds
from servers import embedserve_infer
from servers.base import Server
from servers.embedserve import EmbedServe
from servers.open_inference import Tensor
from servers.triton import MODEL, Triton, tensors_of
from workloads import Request, Workload, workload

CLIENT_CORE = 1
KEY = f"/embedserve-bench-{os.getpid()}"
HEAD_BYTES_MAX = 64 << 10
SHARED_MEMORY = "/v2/systemsharedmemory/region"

SendRequest = Callable[[int], np.ndarray]
"""Sends the request with the given number, and returns its vectors."""


@dataclass(frozen=True)
class Figures:
    """Figures of one way: the median latency, requests per second, and the server's CPU time per
    request."""

    p50_ms: float
    rate: float
    server_ms: float


@dataclass(frozen=True)
class Target:
    """A server, and the model and output to request from it.

    Attributes:
        model: name of the model.
        output: name of the requested output.
        tensors: makes the input tensors of a request.
    """

    server: Server
    model: str
    output: str
    tensors: Callable[[Request], list[Tensor]]

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/infer"


class Connection:
    """A keep-alive HTTP/1.1 connection that receives into one buffer."""

    def __init__(self, sock: socket.socket, body_bytes_max: int) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(body_bytes_max + HEAD_BYTES_MAX))

    def post(self, path: str, parts: Sequence[bytes], more: str = "") -> tuple[bytes, memoryview]:
        """Returns (headers, body) of the response; the body is valid until the next request."""
        nbytes = sum(map(len, parts))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {nbytes}\r\n{more}\r\n"
        self._sock.sendall(b"".join((head.encode(), *parts)))
        received = end = 0
        while not end:
            received += self._receive(received)
            end = bytes(self._buffer[: min(received, HEAD_BYTES_MAX)]).find(b"\r\n\r\n") + 4
            end = 0 if end < 4 else end
        answer_head = bytes(self._buffer[:end]).lower()
        assert answer_head.startswith(b"http/1.1 200"), bytes(self._buffer[:received])[:2000]
        total = end + int(header(answer_head, b"content-length"))
        while received < total:
            received += self._receive(received)
        return answer_head, self._buffer[end:total]

    def _receive(self, start: int) -> int:
        count = self._sock.recv_into(self._buffer[start:])
        assert count, "the server closed the connection"
        return count


def header(head: bytes, name: bytes) -> bytes:
    return head.partition(b"\r\n" + name + b":")[2].partition(b"\r\n")[0].strip()


@contextmanager
def memory(key: str, nbytes: int) -> Iterator[np.ndarray]:
    """Creates a file in /dev/shm and maps it as uint8. Deletes it at the end of the block."""
    path = Path(f"/dev/shm{key}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, nbytes)
        yield np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    finally:
        os.close(descriptor)
        path.unlink()


def over_a_socket(sock: socket.socket, asked: Target, work: Workload) -> SendRequest:
    """Returns a function that sends tensors in binary after the JSON, in both directions."""
    connection = Connection(sock, work.answer_bytes)
    outputs = [{"name": asked.output, "parameters": {"binary_data": True}}]
    bodies = []
    for request in work.requests:
        tensors = asked.tensors(request)
        inputs = [
            one.head | {"parameters": {"binary_data_size": one.values.nbytes}} for one in tensors
        ]
        head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
        bodies.append((head, [one.values.tobytes() for one in tensors]))

    def ask(number: int) -> np.ndarray:
        head, data = bodies[number]
        more = f"Inference-Header-Content-Length: {len(head)}\r\n"
        answer_head, body = connection.post(asked.path, (head, *data), more)
        start = int(header(answer_head, b"inference-header-content-length"))
        return np.frombuffer(body[start:], "<f4")

    return ask


def through_memory(
    sock: socket.socket, ids: np.ndarray, vectors: np.ndarray, asked: Target, work: Workload
) -> SendRequest:
    connection = Connection(sock, work.answer_bytes)
    for name, region in (("ids", ids), ("vectors", vectors)):
        told = {"key": f"{KEY}-{name}", "offset": 0, "byte_size": region.nbytes}
        connection.post(f"{SHARED_MEMORY}/{name}/register", [json.dumps(told).encode()])
    placed = {"shared_memory_region": "vectors", "shared_memory_byte_size": work.answer_bytes}
    outputs = [{"name": asked.output, "parameters": placed}]
    requests = []
    for request in work.requests:
        tensors, inputs, offset = asked.tensors(request), [], 0
        for one in tensors:
            parameters = {
                "shared_memory_region": "ids",
                "shared_memory_byte_size": one.values.nbytes,
                "shared_memory_offset": offset,
            }
            inputs.append(one.head | {"parameters": parameters})
            offset += one.values.nbytes
        data = np.frombuffer(b"".join(one.values.tobytes() for one in tensors), np.uint8)
        requests.append((json.dumps({"inputs": inputs, "outputs": outputs}).encode(), data))

    def ask(number: int) -> np.ndarray:
        body, data = requests[number]
        ids[: data.nbytes] = data
        connection.post(asked.path, [body])
        return vectors[: work.answer_bytes].view("<f4")

    return ask


def tcp() -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", running.PORT))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return sock


def drive(ask: SendRequest, work: Workload, pid: int, seconds: float) -> Figures:
    """Measures one way. The first pass is not timed, and one of its results is checked."""
    request = work.requests[0]
    work.check(request, ask(0).reshape(request.examples, -1))
    for number in range(len(work.requests)):
        ask(number)
    times: list[float] = []
    start, server_s = time.perf_counter(), cpu_seconds(pid)
    while time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        ask(len(times) % len(work.requests))
        times.append(time.perf_counter() - begin)
    rate = len(times) / (time.perf_counter() - start)
    server_ms = (cpu_seconds(pid) - server_s) / len(times) * 1e3
    return Figures(statistics.median(times) * 1e3, rate, server_ms)


def measure(asked: Target, work: Workload, path: Path, seconds: float) -> dict[str, Figures]:
    """Starts the server once and returns the figures by way.

    Args:
        path: Unix socket of the server, if it has one.
    """
    with ExitStack() as stack:
        ids = stack.enter_context(memory(f"{KEY}-ids", 16 << 20))
        vectors = stack.enter_context(memory(f"{KEY}-vectors", work.answer_bytes))
        process = stack.enter_context(running.running(asked.server, work))
        ways = {"TCP": partial(over_a_socket, stack.enter_context(tcp()))}
        if isinstance(asked.server, EmbedServe):
            ways["Unix socket"] = partial(over_a_socket, stack.enter_context(unix(path)))
            sock = stack.enter_context(unix(path))
        else:
            sock = stack.enter_context(tcp())
        ways["shared memory"] = partial(through_memory, sock, ids, vectors)
        return {
            f"{asked.server.name}, {name}": drive(way(asked, work), work, process.pid, seconds)
            for name, way in ways.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="bulk for a caller on the same host.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    work = workload("bulk", "uniform")
    work.tables.make()
    os.sched_setaffinity(0, {CLIENT_CORE})
    figures: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "http.sock"
        ours = EmbedServe("--http-uds", str(path), "--shared-memory", "/embedserve-bench-")
        servers = [
            Target(ours, work.tables.name, "pooled", partial(embedserve_infer.tensors_of, work))
        ]
        if not Triton().missing():
            servers.append(Target(Triton(), MODEL, "values", tensors_of))
        for _ in range(options.rounds):
            for asked in servers:
                for name, one in measure(asked, work, path, options.seconds).items():
                    figures.setdefault(name, []).append(one)
    print(f"{'':26} {'p50 ms':>8} {'requests/s':>11} {'server ms':>10}")
    for name, samples in figures.items():
        p50_ms, rate, server_ms = (
            statistics.median(getattr(one, field) for one in samples)
            for field in ("p50_ms", "rate", "server_ms")
        )
        print(f"{name:26} {p50_ms:8.2f} {rate:11.0f} {server_ms:10.2f}")
    print(f"{'the bare kernel':26} {kernel.measure(work)['kernel']:8.2f}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main()
