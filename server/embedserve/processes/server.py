"""Builds the objects of one server process, wires them, runs them and drains them.

Only this module knows all packages. The server accepts requests when every model is warm.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING

from embedserve.access.authenticator import Authenticator
from embedserve.access.client_address import ClientAddresses
from embedserve.api.admin import AdminOperations
from embedserve.api.console.labels import read_labels
from embedserve.api.management import health_app, management_app
from embedserve.batching.batcher import BATCHES_PER_REPLICA
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.config import Limits, ServeSettings, is_loopback
from embedserve.errors import DRAINING
from embedserve.file_reloader import poll_all
from embedserve.metrics.metrics import CounterRoom, Metrics
from embedserve.metrics.shared_counters import WorkerCounters
from embedserve.model_info import ModelInfo
from embedserve.models.model_registry import ModelRegistry
from embedserve.periodic import repeat
from embedserve.pipeline import RequestPipeline
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.processes.cpu_quota import available_cores
from embedserve.processes.next_version import restorer, router_restorer
from embedserve.processes.open_store import open_folder, row_selection
from embedserve.processes.rollout.messages import Target
from embedserve.processes.rollout.version_manager import Restored, VersionManager
from embedserve.processes.startup.ports import Ports
from embedserve.processes.watchdog import watched
from embedserve.shared_memory.region_registry import RegionRegistry
from embedserve.wire.allowed_hosts import AllowedHosts
from embedserve.wire.grpc.service import GrpcService
from embedserve.wire.tls.certificates import Certificates, tls_files
from embedserve.wire.wire_server import WireServer
from embedserve_store import ModelVersion

if TYPE_CHECKING:
    from embedserve.fanout.shards import Shards
    from embedserve.tracing.otlp import OtlpTraces
    from embedserve.wire.grpcio_server import GrpcioServer

logger = logging.getLogger(__name__)

INTEGRITY_CHECK_S = 10.0
"""Seconds between two integrity checks of the served models."""
EXPIRY_CHECK_S = 1.0
"""Seconds between two checks for expired tokens and certificates, and for regions of shared memory
whose files or owners are gone."""
MANAGEMENT_LIMITS = Limits(connections_max=256, connection_bytes_max=64 << 20)
"""Limits on the connections of the management port; its requests are counted with all others."""
GARBAGE_THRESHOLD = 20_000
"""New objects between two collections of the youngest generation. Python's default of 700 costs 5 %
of a core."""


def threads_per_batch(settings: ServeSettings) -> int:
    """Returns the number of threads that a process splits a large batch over: its share of the
    available cores."""
    return max(1, available_cores() // settings.workers)


def executor_threads(settings: ServeSettings, engines: Iterable[LookupEngine]) -> int:
    """Returns the size of the executor that the batchers of all ``engines`` share. It has room for
    the chunks of a large batch and for as many small batches; on GPUs at least for all batches that
    may be in flight."""
    in_flight = sum(BATCHES_PER_REPLICA * one.replicas for one in engines if one.waits_for_device)
    return max(2 * threads_per_batch(settings), in_flight)


def build_pipeline(
    infos: Collection[ModelInfo],
    settings: ServeSettings,
    counters: WorkerCounters | None = None,
    room: CounterRoom | None = None,
    shards: Shards | None = None,
) -> RequestPipeline:
    """Returns the pipeline of a server that starts with the models ``infos``, whose batchers the
    version manager makes. A worker counts in its ``counters``, which have ``room``. ``shards``
    are those of a router."""
    room = room or CounterRoom.of(infos, settings)
    metrics = Metrics(infos, counters, settings.tables, room)
    metrics.shards.source = shards
    authenticator = Authenticator(settings.tokens) if settings.tokens else None
    metrics.callers.callers = authenticator
    traces = _traces(settings)
    telemetry = RequestTelemetry(
        settings.slow_ms, sends_timing=settings.server_timing, traces=traces
    )
    served = ModelRegistry(settings.default_model, settings.limits)
    prefix = settings.shared_memory
    shared = RegionRegistry(prefix, settings.limits) if prefix else None
    addresses = ClientAddresses(settings.trusted_proxy)
    return RequestPipeline(served, metrics, authenticator, telemetry, shared, addresses)


def _traces(settings: ServeSettings) -> OtlpTraces | None:
    """Returns the exporter of traces. Without an endpoint it returns None, and OpenTelemetry is not
    imported."""
    if not settings.otlp_endpoint:
        return None
    from embedserve.tracing import otlp

    return otlp.OtlpTraces(settings.otlp_endpoint, settings.trace_share)


def build_version_manager(
    pipeline: RequestPipeline,
    restored: Mapping[str, Restored],
    settings: ServeSettings,
    executor: ThreadPoolExecutor,
    worker: int = 0,
    shards: Shards | None = None,
) -> VersionManager:
    """Returns the manager that serves the versions ``restored`` at the start, by served name, and
    switches them. ``worker`` is the number of this process among the workers. ``shards`` are those
    of a router."""
    selection = row_selection(settings)

    def open_version(name: str, target: Target) -> ModelVersion:
        return open_folder(target.path, selection)

    engines = (engine for _, engine, _ in restored.values())
    restore = restorer(settings, engines, worker) if shards is None else router_restorer(shards)
    threads = threads_per_batch(settings)
    manager = VersionManager(pipeline, restored, executor, threads, open_version, restore)
    if shards is not None:
        manager.why_not_yet = shards.expect_and_check
        manager.start = shards.start
    return manager


async def run_server(
    stop: asyncio.Event,
    pipeline: RequestPipeline,
    settings: ServeSettings,
    ports: Ports,
    log_ready: Callable[[], None],
    admin: AdminOperations | None = None,
    on_drain: Callable[[], None] = lambda: None,
) -> None:
    """Serves on the running event loop until ``stop`` is set, then drains.

    The supervisor watches workers; a watchdog watches a single process.

    Args:
        log_ready: called once, when both ports accept requests.
        admin: executes admin operations; without it they are not offered.
        on_drain: called once, when the drain begins.

    Raises:
        OSError: another process has taken a port of this server, or a certificate, its key or the
            labels are missing.
        ValueError: one of these files was damaged since the start.
    """
    async with watched(0.0 if settings.is_supervised else settings.worker_hang_s):
        files = tls_files(settings)
        certificates = None if files is None else Certificates(files)
        wires = _wires(pipeline, settings, certificates, admin)
        grpcio_server = await _listen(wires, pipeline, settings, ports)
        traces = pipeline.telemetry.traces
        if traces is not None:
            traces.start()
        _freeze_garbage()
        log_ready()
        periodic = _start_periodic(pipeline, certificates)
        await stop.wait()
        on_drain()
        for task in periodic:
            task.cancel()
        logger.info("draining: answering what was accepted, for at most %g s", settings.drain_s)
        # A startup server that ends still says that the models are being loaded: the requests that
        # it rejects come to a server that starts.
        pipeline.models.not_ready = pipeline.models.not_ready or DRAINING
        ports.remove_files()
        drains: list[Awaitable[None]] = []
        if grpcio_server is not None:
            # First, so that no call is accepted once the HTTP port refuses connections.
            drains.append(await grpcio_server.begin_drain(settings.drain_s))
        drains += [wire.drain(settings.drain_s) for wire in wires]
        await asyncio.gather(*drains)
        if pipeline.shared_memory is not None:
            pipeline.shared_memory.close()
        if traces is not None:
            await asyncio.to_thread(traces.stop)
        logger.info("stopped")


async def _listen(
    wires: Sequence[WireServer], pipeline: RequestPipeline, settings: ServeSettings, ports: Ports
) -> GrpcioServer | None:
    """Listens on all ports; returns the server of the gRPC port if that is grpcio's."""
    grpcio_server = None
    if settings.grpc_server == "grpcio":
        from embedserve.wire.grpcio_server import GrpcioServer

        grpcio_server = GrpcioServer(pipeline, ports.release_grpc(), shares_port=ports.are_shared)
        await grpcio_server.start()
        await wires[0].listen([ports.http_socket])
    else:
        ports.listen(with_grpc=True)
        grpc = [] if ports.grpc_socket is None else [ports.grpc_socket]
        unix = [one.sock for one in ports.unix]
        await wires[0].listen([ports.http_socket, *grpc, *unix])
    if ports.management_socket is not None:
        await wires[1].listen([ports.management_socket])
    return grpcio_server


def _start_periodic(
    pipeline: RequestPipeline, certificates: Certificates | None
) -> list[asyncio.Task[None]]:
    """Starts the periodic tasks: integrity checks of the models, reloads of files, and expiry."""
    authenticator, shared = pipeline.authenticator, pipeline.shared_memory
    reloaders = [one.reloader for one in (certificates, authenticator) if one is not None]
    periodic = [
        asyncio.create_task(repeat(INTEGRITY_CHECK_S, pipeline.models.check_integrity)),
        asyncio.create_task(poll_all(reloaders)),
    ]
    if authenticator is not None:
        periodic.append(asyncio.create_task(repeat(EXPIRY_CHECK_S, authenticator.refresh_expiry)))
    if shared is not None:
        may_embed = None if authenticator is None else authenticator.may_embed
        periodic.append(
            asyncio.create_task(repeat(EXPIRY_CHECK_S, partial(shared.drop_stale, may_embed)))
        )
    return periodic


def _wires(
    pipeline: RequestPipeline,
    settings: ServeSettings,
    certificates: Certificates | None,
    admin: AdminOperations | None,
) -> list[WireServer]:
    """Returns the wire servers of the two ports, and of the management port if there is one.

    Admin operations are offered only where others cannot request them: on the management port, or
    where tokens identify callers.
    """
    labels = read_labels(settings.labels) if settings.labels else None
    names = AllowedHosts(settings.allowed_host)
    is_open = is_loopback(settings.host) and pipeline.authenticator is None and certificates is None
    checked = names if is_open else None
    if settings.management_port < 0:
        admin = admin if settings.tokens else None
        app = management_app(pipeline, admin, labels)
        return [WireServer(pipeline, app, certificates, allowed_hosts=checked)]
    service = GrpcService(pipeline, has_management=False, lists_models=bool(settings.part))
    wire = WireServer(pipeline, health_app(pipeline), certificates, service, allowed_hosts=checked)
    authenticates = not is_loopback(settings.management_host)
    management = WireServer(
        pipeline,
        management_app(pipeline, admin, labels, authenticates=authenticates),
        certificates if authenticates else None,
        GrpcService(pipeline, authenticates=authenticates),
        MANAGEMENT_LIMITS,
        None if authenticates else names,
    )
    return [wire, management]


def stop_or_end(stop: asyncio.Event, number: int) -> None:
    """Sets ``stop`` at the first signal; at a second signal ends the process immediately."""
    if not stop.is_set():
        stop.set()
        return
    logger.warning("terminated by a second %s; accepted requests are lost", Signals(number).name)
    logging.shutdown()
    os._exit(128 + number)


def _freeze_garbage() -> None:
    """Begins to collect garbage, which is disabled while models load. Excludes the objects that
    torch and the models left behind: a collection of them takes 100 ms.

    Requests create few cycles, so new objects are collected less often, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
    gc.enable()
