"""A server process over the fake engine, for the tests that stop one.

Prints its two ports when ready. Every lookup runs in the thread and takes so many seconds.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import uvloop
from server.fake_engine import FakeEngine
from server.live import IN_THREAD, make_service

from embedserve.config import ServeSettings
from embedserve.processes import server
from embedserve.processes.ports import claim_ports


def main(lookup_s: float, drain_s: float) -> None:
    settings = ServeSettings(store="", drain_s=drain_s, limits=IN_THREAD)
    ports = claim_ports("127.0.0.1", 0, 0)
    engine = FakeEngine()
    engine.delay_s = lookup_s
    with ThreadPoolExecutor(1) as executor:
        service = make_service(engine, executor=executor, limits=IN_THREAD)

        def say_ready() -> None:
            print(ports.http, ports.grpc, flush=True)

        uvloop.run(server.run(service, settings, ports, say_ready))


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
