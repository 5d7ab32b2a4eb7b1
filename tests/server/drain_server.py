"""A server process over the fake engine, for the tests that stop one.

Prints its two ports when ready. Every lookup runs in the thread and takes LOOKUP_S. gRPC comes from
grpcio, or from pyvoy: then the server runs in an Envoy, which loads drain_app.py.
"""

from __future__ import annotations

import os
import sys
import time

from embedserve.config import Limits, ServeSettings
from embedserve.ports import Ports, claim_ports

LOOKUP_S = "TEST_LOOKUP_S"
IN_THREAD = Limits(inline_bytes_max=0)


def main(grpc_server: str, lookup_s: str, drain_s: str) -> int:
    os.environ[LOOKUP_S] = lookup_s
    settings = ServeSettings(store="", drain_s=float(drain_s), limits=IN_THREAD)
    ports = claim_ports("127.0.0.1", 0, 0)
    if grpc_server == "grpcio":
        return run(settings, ports)
    from embedserve.pyvoy_host import run_envoy

    return run_envoy(settings, ports, time.perf_counter(), "server.drain_app:app")


def run(settings: ServeSettings, ports: Ports) -> int:
    import uvloop
    from server.drain_app import opened

    from embedserve import server

    with opened(None, ports) as (service, say_ready):
        uvloop.run(server.run(service, settings, ports, say_ready))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
