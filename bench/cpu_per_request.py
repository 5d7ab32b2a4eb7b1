"""CPU time of the server for a request of `small`: without sockets, load generator and kernel.

    python bench/cpu_per_request.py [--times 5] [--tokens] [CHECKOUT ...] [--only JSON gRPC]
    python bench/cpu_per_request.py --walk [--only JSON gRPC]

It covers the server's own interfaces, TorchRec's predictor, and the Open Inference Protocol with
the inputs F.ids and F.lengths and the output `pooled`.

In a round each of 64 connections receives one request, as the event loop would deliver it, and
discards its response. A round takes a millisecond or two. The best of all rounds is reported,
because other work on the machine leaves some rounds undisturbed. Differences of a percent are thus
visible, while rates of whole servers vary by ten percent from one second to the next.

Other checkouts, such as the commit before a change, take turns with this one. With --tokens each
way is measured both without and with the token that the server then requires.

--walk lists the calls of one request instead.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from types import FrameType

from load import GRPC_HEADERS, framed
from servers.base import Way
from servers.embedserve import GRPC, JSON, MESSAGE, OURS, EmbedServe
from servers.embedserve_infer import EmbedServeInfer
from servers.open_inference import infer_ways
from workloads import Request, Workload, workload

import embedserve
from embedserve.pipeline import RequestPipeline

CONNECTIONS = 64
ROUNDS = 1000
WARM_ROUNDS = 50
TURNS = 4
"""Event-loop iterations after which a batch is finished and its responses are written."""
SHAPE = workload("small", "uniform")
WINDOW_MAX = 2**31 - 1


class Sink(asyncio.Transport):
    """Transport that accepts all data immediately and counts its bytes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.nbytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.nbytes += len(data)

    def writelines(self, parts: object) -> None:
        self.nbytes += 1

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        pass

    def pause_reading(self) -> None:
        raise AssertionError("a request was not read whole")


def greeting() -> bytes:
    """Returns the frames that begin an HTTP/2 connection, with windows that no response fills."""
    from embedserve.wire.http2 import frames

    settings = frames.settings((frames.SETTINGS_INITIAL_WINDOW_SIZE, WINDOW_MAX))
    return settings + frames.window_update(0, WINDOW_MAX - 65_535)


class Predictor(EmbedServe):
    """The server, with requests as TorchRec's own client sends them."""

    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        from embedserve_proto.predictor_pb2 import PredictionRequest, SparseFeatures

        bags = SparseFeatures(
            num_features=len(request.lengths),
            lengths=request.lengths.astype("<i4").tobytes(),
            values=request.ids.astype("<i8").tobytes(),
        )
        asked = PredictionRequest(batch_size=request.examples, id_list_features=bags)
        return asked.SerializeToString()


OWN, INFER = EmbedServe(), EmbedServeInfer()
WAYS: dict[str, tuple[EmbedServe, Way]] = {
    **{way.name: (OWN, way) for way in (JSON, MESSAGE, GRPC)},
    **{f"infer {way.name}": (INFER, way) for way in infer_ways(SHAPE.tables.name)},
    "predict": (Predictor(), Way("predict", "grpc", "/predictor.Predictor/Predict")),
}


def over_http1(server: EmbedServe, way: Way, bodies: list[bytes]) -> Iterator[bytes]:
    """Yields one request after another; all connections get the same."""
    for body in cycle(bodies):
        head = [f"POST {way.path} HTTP/1.1", "Host: localhost:8000"]
        head += [f"{name}: {value}" for name, value in server.headers(way, body).items()]
        yield "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def over_http2(server: EmbedServe, way: Way, bodies: list[bytes]) -> Iterator[bytes]:
    from embedserve.wire.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame_header
    from embedserve.wire.http2.header_blocks import encode

    headers = {":method": "POST", ":scheme": "http", ":path": way.path, ":authority": "localhost"}
    headers |= GRPC_HEADERS | server.headers(way, bodies[0])
    block = encode((name.encode(), value.encode()) for name, value in headers.items())
    for stream, body in zip(count(1, 2), cycle(bodies), strict=False):
        message = framed(body)
        opening = frame_header(len(block), HEADERS, END_HEADERS, stream) + block
        yield opening + frame_header(len(message), DATA, END_STREAM, stream) + message


@contextmanager
def tokens(is_asked: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (token file, headers with a token); both are empty unless ``is_asked``."""
    if not is_asked:
        yield "", {}
        return
    from embedserve.access.grants import new_token

    token, sha256 = new_token()
    grant = {"name": "bench", "sha256": sha256, "requests_per_second": 1e9, "concurrent": 10**6}
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(json.dumps(grant))
        file.flush()
        yield file.name, {"authorization": f"Bearer {token}"}


@contextmanager
def connected(
    name: str, is_asked: bool, connections: int
) -> Iterator[tuple[RequestPipeline, list[Callable[[bytes], None]], Iterator[bytes]]]:
    """Yields a server's pipeline, the receivers of its connections, and requests for them.

    Args:
        name: way of the requests.
        is_asked: whether the caller has a token.
        connections: number of connections.
    """
    import torch

    from embedserve.api.management import management_app
    from embedserve.config import ServeSettings
    from embedserve.engine.restore import restore
    from embedserve.processes.next_version import as_restored
    from embedserve.processes.server import build_pipeline, build_version_manager
    from embedserve.wire.wire_server import WireServer
    from embedserve_store import ModelStore

    torch.set_num_threads(1)
    work = SHAPE
    work.tables.make()
    model = work.tables.name
    version = ModelStore(work.tables.store).load(model)
    restored = {model: as_restored(model, version, restore(version, "cpu:1"))}
    asked, way = WAYS[name]
    bodies = [asked.body(way, work, request) for request in work.requests[:100]]
    with ThreadPoolExecutor(2) as executor, tokens(is_asked) as (file, headers):
        settings = ServeSettings(store="", tokens=file, default_model=model)
        pipeline = build_pipeline([restored[model][2]], settings)
        build_version_manager(pipeline, restored, settings, executor)
        wire = WireServer(pipeline, management_app(pipeline))
        sinks = [Sink() for _ in range(connections)]
        receivers: list[Callable[[bytes], None]] = []
        for sink in sinks:
            make = wire.http2 if way.protocol == "grpc" else wire.http1
            connection = make(is_local=False)
            connection.connection_made(sink)
            receivers.append(connection.data_received)
            if way.protocol == "grpc":
                connection.data_received(greeting())
        over = over_http2 if way.protocol == "grpc" else over_http1
        requests = over(asked, replace(way, headers={**way.headers, **headers}), bodies)
        yield pipeline, receivers, requests
        counted = pipeline.metrics.protocols["grpc" if way.protocol == "grpc" else "rest"].requests
        counted.flush()
        outcomes = {name: count for name, count in counted.total().items() if count}
        assert set(outcomes) == {"OK"}, outcomes
        assert all(sink.nbytes for sink in sinks)


async def best_us(name: str, is_asked: bool) -> float:
    """Returns the best microseconds per request over a way. The caller has a token if
    ``is_asked``."""
    with connected(name, is_asked, CONNECTIONS) as (_, receivers, requests):
        gc.collect()
        gc.freeze()
        gc.disable()
        best_s = float("inf")
        for number, request in zip(range(WARM_ROUNDS + ROUNDS), requests, strict=False):
            start_s = time.perf_counter()
            for receive in receivers:
                receive(request)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if number >= WARM_ROUNDS:
                best_s = min(best_s, time.perf_counter() - start_s)
    return best_s / CONNECTIONS * 1e6


async def walk(name: str) -> list[tuple[str, str]]:
    """Returns the (file, function) of every call of the server for one request, in order.

    The request is alone on its connection, and its headers and body have been seen before.
    Comprehensions and lambdas belong to the function around them.
    """
    calls: list[tuple[str, str]] = []
    root = str(Path(embedserve.__file__).parent) + os.sep

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and code.co_name[0] != "<":
            calls.append((code.co_filename.removeprefix(root), code.co_qualname))

    with connected(name, False, 1) as (_, (receive,), requests):
        for number, request in zip(range(WARM_ROUNDS), requests, strict=False):
            sys.setprofile(record if number == WARM_ROUNDS - 1 else None)
            receive(request)
            for _ in range(TURNS):
                await asyncio.sleep(0)
        sys.setprofile(None)
    return calls


def print_walk(calls: list[tuple[str, str]]) -> None:
    print(f"{len({file for file, _ in calls})} files, {len(set(calls))} functions, "
          f"{len(calls)} calls")  # fmt: skip
    for file, function in calls:
        print(f"    {file:40} {function}")


def measured_us(name: str, checkout: Path, is_asked: bool) -> float:
    """Measures in a separate process, which imports the package from ``checkout``."""
    asked = ["--tokens"] if is_asked else []
    return float(
        subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--way", name, *asked],
            check=True,
            stdout=subprocess.PIPE,
            env={**os.environ, **EmbedServe(checkout=checkout).environment()},
        ).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The server's own time for a request.")
    parser.add_argument("--times", type=int, default=5, help="runs of each")
    parser.add_argument("--tokens", action="store_true", help="also with one")
    parser.add_argument("--only", nargs="*", choices=WAYS, help="ways; all of them by default")
    parser.add_argument("--walk", action="store_true", help="list the calls of one request")
    parser.add_argument("--way", help="measured in this process, of the package on its path")
    parser.add_argument("checkouts", nargs="*", type=Path)
    chosen = parser.parse_args()
    os.sched_setaffinity(0, {0})
    if chosen.way:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        print(asyncio.run(best_us(chosen.way, chosen.tokens)))
        return
    if chosen.walk:
        for name in chosen.only or WAYS:
            print(name, end=": ")
            print_walk(asyncio.run(walk(name)))
        return
    checkouts = [*chosen.checkouts, OURS]
    cases = [(one, False) for one in checkouts] + [(OURS, True)] * chosen.tokens
    for name in chosen.only or WAYS:
        found: dict[tuple[Path, bool], list[float]] = {case: [] for case in cases}
        for _ in range(chosen.times):
            for case in cases:
                found[case].append(measured_us(name, *case))
        for (checkout, is_asked), all_us in found.items():
            shown = f"{checkout}{' with a token' if is_asked else ''}"
            print(f"{name:12} {shown}: best {min(all_us):.2f}, worst of the bests "
                  f"{max(all_us):.2f} us", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
