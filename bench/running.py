"""Starts a server on its core, waits until it responds, and stops it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from load import pinned
from servers.base import Server, Way
from workloads import Request, Workload

SERVER_CORE = "0"
BOTH_CORES = "0,1"
PORT = 18_080
READY_S_MAX = 120
MODEL_READY_S_MAX = 90
"""Seconds from accepting connections to the first successful response, at most."""


@contextmanager
def running(
    server: Server, workload: Workload, core: str = SERVER_CORE
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the server and yields its process once it responds. Stops it with all its children at
    the end."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            pinned(core, server.command(workload, PORT)),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.environment()},
            start_new_session=True,
        )
        try:
            _wait_for_ports(server, process)
            server.prepare(workload, PORT)
            way = server.ways[0]
            if way.protocol != "redis":
                # A port may accept connections before its model is loaded.
                ask(server, way, workload, workload.requests[0])
            yield process
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            raise
        finally:
            _end(process)


def port_of(way: Way) -> int:
    return PORT + 1 if way.protocol.startswith("grpc") else PORT


def _wait_for_ports(server: Server, process: subprocess.Popen[bytes]) -> None:
    ports = {port_of(way) for way in server.ways}
    end = time.monotonic() + READY_S_MAX
    while ports:
        for port in list(ports):
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    ports.remove(port)
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{server.name} did not start")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # processes that it left behind
    process.wait()


def ask(server: Server, way: Way, workload: Workload, request: Request) -> bytes:
    """Returns the response to one request, sent by a client that fails on any error."""
    body = server.body(way, workload, request)
    if way.protocol.startswith("http"):
        return _post(way, body, server.headers(way, body))
    if way.protocol.startswith("grpc"):
        return _call(way, body)
    raise ValueError(f"{way.protocol} is asked by its server's own module")


def metrics() -> dict[str, float]:
    """Returns embedserve's metrics, by name and labels as exposed.

    Raises:
        OSError: the worker that received the request has ended.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def _post(way: Way, body: bytes, headers: dict[str, str]) -> bytes:
    url = f"http://127.0.0.1:{PORT}{way.path}"
    end = time.monotonic() + MODEL_READY_S_MAX
    while True:
        try:
            request = urllib.request.Request(url, body, headers)
            with urllib.request.urlopen(request, timeout=30) as response:
                answer: bytes = response.read()
                return answer
        except (urllib.error.HTTPError, OSError) as error:
            if time.monotonic() > end:
                raise RuntimeError(f"{url}: {error}") from error
            time.sleep(0.2)


def _call(way: Way, body: bytes) -> bytes:
    import grpc

    end = time.monotonic() + MODEL_READY_S_MAX
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{PORT + 1}", options=options) as channel:
        while True:
            try:
                if way.protocol != "grpc-stream":
                    one: bytes = channel.unary_unary(way.path)(body, timeout=60)
                    return one
                (answer,) = channel.stream_stream(way.path)(iter([body]), timeout=60)
                return answer  # type: ignore[no-any-return]
            except grpc.RpcError as error:
                is_early = error.code() is grpc.StatusCode.UNAVAILABLE
                if not is_early or time.monotonic() > end:
                    raise RuntimeError(f"{way.path}: {error}") from error
                time.sleep(0.2)
