"""A server process over the fake engine, for the tests that stop one.

Prints its two ports when ready. Every lookup runs in the thread and takes LOOKUP_S.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop
from server.fake_engine import FakeEngine
from server.live import IN_THREAD, free_port, make_service

from embedserve import server
from embedserve.config import ServeSettings


def main(lookup_s: float, drain_s: float) -> None:
    engine = FakeEngine()
    engine.delay_s = lookup_s
    settings = ServeSettings(
        store=Path(), http_port=0, grpc_port=free_port(), drain_s=drain_s, limits=IN_THREAD
    )
    sock = server.bind_http(settings)
    ports = sock.getsockname()[1], settings.grpc_port
    with ThreadPoolExecutor(1) as executor:
        service = make_service(engine, executor=executor, limits=IN_THREAD)
        uvloop.run(server.run(service, settings, sock, lambda: print(*ports, flush=True)))


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
