"""A gRPC caller that periodically makes a call, and reports the outcome and latency of each.

It is a separate process with a higher priority than the load on the same core. It thus measures the
latency of the server, not the time that the core is busy.

    python bench/operations/probe.py PORT PATH BODY PAUSE_S

It prints a line per call until it is terminated: the status and the milliseconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import grpc


def ask(port: int, path: str, body: bytes, pause_s: float) -> None:
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.unary_unary(path)
        while True:
            start = time.perf_counter()
            try:
                call(body, timeout=30)
                status = "OK"
            except grpc.RpcError as error:
                status = error.code().name
            print(status, (time.perf_counter() - start) * 1e3, flush=True)
            time.sleep(pause_s)


if __name__ == "__main__":
    port, path, body, pause_s = sys.argv[1:]
    ask(int(port), path, Path(body).read_bytes(), float(pause_s))
