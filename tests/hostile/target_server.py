"""The server process that the hostile tests attack: the whole server over a numpy table, no torch.

Prints its two ports when ready. Its first argument names its limits, if any: "defaults" for the
default limits of a server, "narrow" for little connection memory. Two further arguments are its
certificate and key; both ports then use TLS.
"""

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import uvloop
from server.fake_engine import FakeEngine, model_info
from server.pipelines import make_pipeline

from embedserve.config import DEFAULT_LIMITS, Limits, ServeSettings
from embedserve.processes.server import run_server
from embedserve.processes.startup.ports import claim_ports

ROWS, DIM = 500, 64
LIMITS = Limits(body_bytes_max=1 << 20, queue_examples_max=1 << 20, queue_ids_max=1 << 24)
NARROW = Limits(
    connections_max=500,
    connection_bytes_max=64 << 20,
    request_output_bytes_max=16 << 20,
    queue_examples_max=1 << 24,
)


def table() -> np.ndarray:
    """Returns rows of whole numbers, whose sums are exact."""
    return np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)


class TableEngine(FakeEngine):
    """A fake engine that sums rows of the table and keeps no batch. Hostile requests for large
    responses have one id per bag; such a lookup takes the millisecond that torch takes for 8 MiB.
    """

    def __init__(self) -> None:
        super().__init__(model_info("m", {"user": (ROWS, DIM)}))
        self.table = table()

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        if (lengths == 1).all():
            return np.take(self.table, ids, axis=0)
        sums = np.zeros((len(lengths), DIM), np.float32)
        filled = lengths > 0
        starts = (lengths.cumsum() - lengths)[filled]
        if starts.size:
            # Neither call holds the GIL, as in real lookups off the event loop.
            sums[filled] = np.add.reduceat(np.take(self.table, ids, axis=0), starts)
        return sums


async def serve(limits: Limits, certificate: str = "", key: str = "") -> None:
    """Serves until SIGTERM; prints the ports once they accept requests."""
    settings = ServeSettings(
        store="", limits=limits, tls_cert=certificate, tls_key=key, allowed_host=("*",)
    )
    ports = claim_ports("127.0.0.1", 0, 0)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(TableEngine(), executor=executor, limits=limits)

        def log_ready() -> None:
            print(ports.http, ports.grpc, flush=True)

        await run_server(stop, pipeline, settings, ports, log_ready)


if __name__ == "__main__":
    named = {"": LIMITS, "defaults": DEFAULT_LIMITS, "narrow": NARROW}
    uvloop.run(serve(named["".join(sys.argv[1:2])], *sys.argv[2:]))
