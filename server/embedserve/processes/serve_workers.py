"""`serve --workers N`: opens what workers share, then forks them and stays to supervise them.

This process imports neither torch nor grpc and has no thread when it forks: each worker imports
them for itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from embedserve.config import ServeSettings
from embedserve.metrics.metrics import cells_per_worker
from embedserve.metrics.slots import Slot, Slots
from embedserve.processes.ports import SharedPorts, claim_ports
from embedserve.processes.serve import (
    open_versions,
    prepared,
    restore_all,
    say_ready_to_serve,
)
from embedserve.processes.supervisor import Supervisor
from embedserve_store import ModelStore, ModelVersion, StoreError
from embedserve_store.remote.remote_store import is_url


def serve_workers(settings: ServeSettings, start_s: float) -> None:
    """Runs ``settings.workers`` workers until SIGTERM or SIGINT.

    Args:
        start_s: perf_counter when the server began.

    Raises:
        StoreError: nothing to serve, or a version that cannot be served.
        OSError: a port cannot be bound, or a worker ended before the server was ready.
        ValueError: a setting makes no sense.
    """
    is_remote = is_url(settings.store)
    versions = _opened_by_child(settings) if is_remote else open_versions(settings)
    ports = claim_ports(settings.host, settings.http_port, settings.grpc_port).share()
    try:
        versions = prepared(settings, versions)
        features = (len(version.manifest.features) for version in versions.values())
        slots = Slots(settings.workers, cells_per_worker(features))

        def run_worker(index: int, channel: socket.socket) -> int:
            return _run_worker(settings, versions, ports, Slot(slots, index), channel, start_s)

        Supervisor(run_worker, slots, settings.drain_s).run()
    finally:
        ports.close()


def _run_worker(
    settings: ServeSettings,
    versions: dict[str, ModelVersion],
    ports: SharedPorts,
    slot: Slot,
    channel: socket.socket,
    start_s: float,
) -> int:
    """Serves as one worker, in its process; gives the exit code."""
    import uvloop

    from embedserve.processes import server, worker

    try:
        engines = restore_all(settings, versions, is_shown=slot.worker == 0)
        threads = server.lookup_threads(settings)
        with ThreadPoolExecutor(threads, thread_name_prefix="lookup") as executor:
            service = server.build_service(engines, settings, executor, slot)

            def announce() -> None:
                seconds = time.perf_counter() - start_s
                models = service.models()
                say_ready_to_serve(models, versions, ports, seconds, settings.workers)

            if worker.wait_to_go(channel):
                uvloop.run(worker.run_worker(service, settings, ports, channel, announce))
    except (StoreError, OSError, ValueError) as error:
        if isinstance(error, ValueError) and type(error) is not ValueError:
            raise
        worker.tell_failure(channel, error)
        return 1
    return 0


def _opened_by_child(settings: ServeSettings) -> dict[str, ModelVersion]:
    """As open_versions, for a remote store, whose clients have threads: a child pulls the versions,
    and here they are opened where it put them.

    Raises:
        StoreError: as open_versions.
    """
    reading, writing = os.pipe()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        _report_pulled(settings, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        report = pipe.read()
    os.waitpid(child, 0)
    if not report:
        raise StoreError(f"{settings.store}: the process that pulls it was ended")
    pulled = json.loads(report)
    if isinstance(pulled, str):
        raise StoreError(pulled)
    return {
        name: ModelStore(Path(path).parent.parent).load(name, int(Path(path).name))
        for name, path in pulled.items()
    }


def _report_pulled(settings: ServeSettings, pipe: int) -> None:
    """Writes the folder of each version to ``pipe``, or why there is none; ends the process."""
    status = 1
    try:
        try:
            versions = open_versions(settings)
            report: object = {name: str(one.path) for name, one in versions.items()}
        except (StoreError, OSError, ValueError) as error:
            report = str(error)
        os.write(pipe, json.dumps(report).encode())
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)
