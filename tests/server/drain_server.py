"""A server process over the fake engine, for the tests that stop one.

Prints its two ports when ready. Every lookup runs in the thread and takes LOOKUP_S.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import uvloop
from server.fake_engine import FakeEngine
from server.live import IN_THREAD, make_service

from embedserve import server
from embedserve.config import ServeSettings
from embedserve.ports import claim_ports


def main(lookup_s: float, drain_s: float) -> None:
    engine = FakeEngine()
    engine.delay_s = lookup_s
    settings = ServeSettings(store="", drain_s=drain_s, limits=IN_THREAD)
    ports = claim_ports("127.0.0.1", 0, 0)
    with ThreadPoolExecutor(1) as executor:
        service = make_service(engine, executor=executor, limits=IN_THREAD)

        def say_ready() -> None:
            print(ports.http, ports.grpc, flush=True)

        uvloop.run(server.run(service, settings, ports, say_ready))


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
