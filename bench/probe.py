"""One caller over gRPC that asks now and then, and says how each of its calls ends, and when.

A process of its own, which runs before the load that shares its core: what it tells is how long
the server takes, not how long its core is kept busy.

    python bench/probe.py PORT PATH BODY PAUSE_S

It prints a line for each call until it is ended: its status and its milliseconds.
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
