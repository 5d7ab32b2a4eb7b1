"""What drain_server.py serves, also as the application of an Envoy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from server.drain_server import IN_THREAD, LOOKUP_S
from server.fake_engine import FakeEngine
from server.live import make_service

from embedserve.ports import Ports
from embedserve.pyvoy_app import PyvoyApp, Served


@contextlib.contextmanager
def opened(given: object, ports: Ports) -> Iterator[Served]:
    """The service, and what prints the ports."""
    engine = FakeEngine()
    engine.delay_s = float(os.environ[LOOKUP_S])
    with ThreadPoolExecutor(1) as executor:
        service = make_service(engine, executor=executor, limits=IN_THREAD)
        yield service, lambda: print(ports.http, ports.grpc, flush=True)


app = PyvoyApp(opened)
