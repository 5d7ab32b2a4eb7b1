"""Builds the objects of one server process, wires them, runs them and drains them.

The only place that knows all parts. Requests are taken when every model is warm.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import uvicorn

from embedserve.api.management import management_app
from embedserve.batching.batcher import Batcher
from embedserve.config import ServeSettings
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.slots import Slot
from embedserve.models.models import Service
from embedserve.processes.ports import BACKLOG, Ports
from embedserve.types import ModelInfo, TableInfo
from embedserve.wire.grpc_server import GrpcServer
from embedserve.wire.heads import RequestHeads
from embedserve.wire.http1 import EmbedConnection
from embedserve.wire.rest import EmbedEndpoint

if TYPE_CHECKING:
    from embedserve.engine.engine import Engine

logger = logging.getLogger(__name__)

GARBAGE_THRESHOLD = 20_000
"""New objects between two collections of the youngest; Python's own 700 cost 5 % of a core."""


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: one place handles them for both protocols.

    Attributes:
        listening: set when the port takes connections.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def model_info(engine: Engine) -> ModelInfo:
    """What callers may see of a restored model."""
    manifest = engine.manifest
    return ModelInfo(
        name=manifest.model,
        version=manifest.version,
        features=manifest.features,
        rows_per_feature=manifest.rows_per_feature,
        keys=manifest.keys,
        length_per_key=manifest.length_per_key,
        tables=tuple(
            TableInfo(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                pooling=table.pooling,
                dtype=table.dtype,
                features=table.feature_names,
                sharding=engine.plan.tables[table.name].sharding_type,
                ids=table.ids,
            )
            for table in manifest.tables
        ),
        is_pooled=manifest.is_pooled,
        translator=engine.translator,
        device_type=engine.device_type,
        bytes_per_rank=tuple(engine.plan.bytes_per_rank(manifest.tables)),
        replanned=engine.replanned,
        is_scripted=engine.is_scripted,
    )


def lookup_threads(settings: ServeSettings) -> int:
    """Of one process, for large batches: its share of the cores that the server was given."""
    return max(1, len(os.sched_getaffinity(0)) // settings.workers)


def build_service(
    engines: Mapping[str, Engine],
    settings: ServeSettings,
    executor: ThreadPoolExecutor,
    slot: Slot | None = None,
) -> Service:
    """The service over ``engines`` (by model name); a worker counts in its ``slot``."""
    infos = {name: model_info(engine) for name, engine in engines.items()}
    metrics = Metrics(infos.values(), slot, settings.tables)
    batchers = {
        name: Batcher(
            engine,
            infos[name],
            settings.limits,
            metrics.models[name],
            executor,
            lookup_threads(settings),
        )
        for name, engine in engines.items()
    }
    default = settings.default_model or (next(iter(infos)) if len(infos) == 1 else "")
    return Service(batchers, default, settings.limits, metrics)


class GrpcFrontend(Protocol):
    """What run() asks of a gRPC server, which has its port already."""

    async def start(self) -> None:
        """Takes calls, and is healthy."""

    async def stop_being_ready(self) -> None:
        """Health says NOT_SERVING; calls are still answered."""

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, and waits up to ``grace_s`` for those that are running."""


async def run(
    service: Service,
    settings: ServeSettings,
    ports: Ports,
    say_ready: Callable[[], None],
) -> None:
    """Serves until SIGTERM or SIGINT, then drains: accepted requests are answered.

    ``say_ready`` is called once, when both ports take requests.

    Raises:
        OSError: a port was taken from us.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    grpc_server = GrpcServer(service, ports.release_grpc())
    await serve_until(stop, service, settings, ports.http_socket, grpc_server, say_ready)


async def serve_until(
    stop: asyncio.Event,
    service: Service,
    settings: ServeSettings,
    http_socket: socket.socket,
    grpc_server: GrpcFrontend,
    say_ready: Callable[[], None],
) -> None:
    """Serves on the running event loop until ``stop`` is set, then drains."""
    http_server = _HttpServer(
        uvicorn.Config(
            EmbedEndpoint(service, management_app(service)),
            loop="none",
            http=cast(Any, partial(EmbedConnection, service, RequestHeads())),
            ws="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            backlog=BACKLOG,
        )
    )
    await grpc_server.start()
    http_task = asyncio.create_task(http_server.serve(sockets=[http_socket]))
    await _either(http_task, http_server.listening)
    _freeze_garbage()
    say_ready()
    await _either(http_task, stop)
    logger.info("draining: answering what was accepted, for at most %g s", settings.drain_s)
    service.is_ready = False
    await grpc_server.stop_being_ready()
    http_server.should_exit = True
    await asyncio.gather(http_task, grpc_server.stop(settings.drain_s))
    logger.info("stopped")


async def _either(task: asyncio.Task[None], event: asyncio.Event) -> None:
    """Waits for ``event``, or for ``task`` to end, and raises what ended it."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()


def _freeze_garbage() -> None:
    """Takes what torch and the models left behind out of collections, which cost 100 ms each.

    Requests make few cycles, so that what is new is looked through less often, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
