"""A server process over the fake engine, for the tests that stop a server.

Prints its two ports when ready, and drains on SIGTERM and SIGINT. Every lookup runs in the thread.
A lookup takes the given seconds, or waits for SIGUSR2 if they are below 0. On SIGUSR1 the server
hangs. The watchdog ends it after the given seconds, or never if they are 0.
"""

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import uvloop
from server.fake_engine import FakeEngine
from server.pipelines import IN_THREAD, make_pipeline

from embedserve.config import ServeSettings
from embedserve.pipeline import RequestPipeline
from embedserve.processes.logging_setup import set_up_logging
from embedserve.processes.server import run_server
from embedserve.processes.startup.ports import Ports, claim_ports


async def serve(
    pipeline: RequestPipeline, engine: FakeEngine, settings: ServeSettings, ports: Ports
) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, engine.release)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    signal.signal(signal.SIGUSR1, hang_here)

    def log_ready() -> None:
        print(ports.http, ports.grpc, flush=True)

    await run_server(stop, pipeline, settings, ports, log_ready)


def hang_here(*args: object) -> None:
    """Keeps the event loop from running, and computes, like an endless loop."""
    while True:
        pass


def main(lookup_s: float, drain_s: float, grpc_server: str, hang_s: float) -> None:
    set_up_logging("info")
    settings = ServeSettings(
        store="",
        drain_s=drain_s,
        limits=IN_THREAD,
        grpc_server=grpc_server,
        worker_hang_s=hang_s,
        allowed_host=("*",),
    )
    ports = claim_ports("127.0.0.1", 0, 0)
    engine = FakeEngine()
    if lookup_s < 0:
        engine.hold()
    else:
        engine.delay_s = lookup_s
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(engine, executor=executor, limits=IN_THREAD)
        uvloop.run(serve(pipeline, engine, settings, ports))


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
