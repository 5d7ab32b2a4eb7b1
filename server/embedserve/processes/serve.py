"""`embedserve serve`: wires a server of one process or of several workers.

With several --workers, or with --deltas follow, this process opens what the workers share, forks
them and then supervises them. It imports neither torch nor grpc, and has no thread when it forks.
Each worker does its own imports.

From the command until the server listens:

    serve
      _serve_alone                          --workers 1, without --deltas
        _loaded                             engines, pipeline, version manager
        single_process.run_single_process   signals, rollouts
          server.run_server                 listens, serves, drains

      _serve_workers                        --workers N, or --deltas follow
        Supervisor.run                      forks, watches and restarts
          _applier_main                     in the applier of deltas
          _worker_main                      in each worker
            _loaded
            worker.run_worker               waits until all are warm; signals, channel, rollouts
              server.run_server
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from embedserve.config import ServeSettings
from embedserve.config_checks import check_settings, uds_mode
from embedserve.daemon_threads import is_any_running
from embedserve.deltas.delta_target import make_shared_state
from embedserve.file_reloader import named_in_errors
from embedserve.metrics.metrics import CounterRoom
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters
from embedserve.processes.logging_setup import set_up_logging
from embedserve.processes.model_loading import make_resident_and_verify
from embedserve.processes.open_store import open_folder, row_selection
from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.rollout.delta_versions import DeltaVersions
from embedserve.processes.rollout.served_name import RolloutVersion
from embedserve.processes.row_uploads import uploading
from embedserve.processes.sigterm import Terminated
from embedserve.processes.startup.descriptors import reserve_descriptors
from embedserve.processes.startup.loading import (
    on_devices,
    open_versions,
    open_versions_to_fork,
    opened_in_time,
    restore_all,
    with_default_model,
)
from embedserve.processes.startup.ports import Ports, claim_ports
from embedserve.processes.startup.startup_banner import log_ready, warn_about_settings
from embedserve.processes.startup.startup_server import serve_health_while_loading
from embedserve.processes.supervisor import Supervisor
from embedserve.request_checks import INTEGER_DIGITS_MAX
from embedserve.shard_client.discovery import RayShards, parse_shards
from embedserve_store import ModelVersion, StoreError
from embedserve_store.errors import is_process_limit

if TYPE_CHECKING:
    from embedserve.deltas.status import SharedDeltaState
    from embedserve.pipeline import RequestPipeline
    from embedserve.processes.next_version import AnyEngine
    from embedserve.processes.rollout.version_manager import VersionManager
    from embedserve_store.deltas.signing import TrustedKeys

logger = logging.getLogger(__name__)

Versions = dict[str, ModelVersion]
FollowedStates = dict[str, "SharedDeltaState"]
"""State of the versions whose deltas are followed, by served name."""
Notify = Callable[[str], None]
"""Reports a state of service_manager.py."""


def serve(settings: ServeSettings) -> None:
    """Runs the server until SIGTERM or SIGINT.

    Raises:
        StoreError: there is nothing to serve, or a version cannot be served.
        OSError: a port cannot be bound, or a worker ended before the server was ready.
        ValueError: a setting is invalid.
    """
    start_s = time.perf_counter()
    if settings.deltas != "none" and settings.devices == "auto":
        settings = replace(settings, devices="cpu")
    notify = notifier()
    check_settings(settings)
    set_up_logging(settings.log_level, settings.log_format)
    sys.set_int_max_str_digits(INTEGER_DIGITS_MAX)
    settings = reserve_descriptors(settings)
    addresses = _with_addresses(settings)
    _check_files(settings)
    warn_about_settings(settings)
    # SIGHUP polls the store; while models load it must not end the process, its default action.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Whoever starts this process may ignore SIGCHLD. Then the kernel reaps children itself, and
    # waiting for one of ours would be an error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with addresses as settings:
            if settings.is_supervised:
                _serve_workers(settings, start_s, notify)
            else:
                _serve_alone(settings, start_s, notify)
    except Terminated:
        logger.info("stopped before the models were loaded")


def _with_addresses(settings: ServeSettings) -> contextlib.AbstractContextManager[ServeSettings]:
    """Returns a context that yields the settings, with a file of addresses for shards in Ray.

    Raises:
        ValueError: ``shards`` is malformed.
    """
    if not settings.shards or not isinstance(parse_shards(settings.shards), RayShards):
        return contextlib.nullcontext(settings)
    from embedserve.processes.ray_backend.address_follower import following_ray

    return following_ray(settings)


def notifier() -> Notify:
    """Returns the function that reports to the service manager; without one it does nothing.

    Removes the variable, so that no process that this one starts reports, too.
    """
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if not address:
        return lambda state: None
    from embedserve.processes import service_manager

    return partial(service_manager.notify, address)


def _check_files(settings: ServeSettings) -> None:
    """Raises OSError or ValueError for files that would end the server once models are loaded."""
    from embedserve.access.grants import read_grants
    from embedserve.api.console.labels import read_labels
    from embedserve.wire.tls.certificates import read_context, tls_files

    if (files := tls_files(settings)) is not None:
        read_context(files)
    readers: Mapping[str, Callable[[str], object]] = {"tokens": read_grants, "labels": read_labels}
    for name, read in readers.items():
        if path := getattr(settings, name):
            named_in_errors(name)(read)(path)


def _claimed(settings: ServeSettings) -> Ports:
    management = (settings.management_host, settings.management_port)
    requested = management if settings.management_port >= 0 else None
    paths = [(settings.http_uds, "HTTP"), (settings.grpc_uds, "gRPC")]
    unix = [(path, uds_mode(settings), protocol) for path, protocol in paths if path]
    return claim_ports(settings.host, settings.http_port, settings.grpc_port, requested, unix)


def _serve_alone(settings: ServeSettings, start_s: float, notify: Notify) -> None:
    ports = _claimed(settings)
    import_module("embedserve.processes.server")  # shared with the startup server
    try:
        with serve_health_while_loading(settings, ports) as end_startup_server:
            versions = make_resident_and_verify(settings, opened_in_time(settings, open_versions))
            settings = with_default_model(settings, versions)
            with _loaded(settings, versions, {}) as (pipeline, version_manager):
                import uvloop

                from embedserve.processes.single_process import run_single_process

                def on_ready() -> None:
                    _log_ready(pipeline, ports, start_s, settings)
                    notify("READY=1")

                uvloop.run(
                    run_single_process(
                        pipeline,
                        version_manager,
                        settings,
                        ports,
                        end_startup_server,
                        on_ready,
                        partial(notify, "STOPPING=1"),
                    )
                )
                if is_any_running():  # all is served; a load is not awaited
                    logging.shutdown()
                    os._exit(0)
    finally:
        ports.close()


@contextlib.contextmanager
def _loaded(
    settings: ServeSettings,
    versions: Versions,
    deltas: FollowedStates,
    counters: WorkerCounters | None = None,
    room: CounterRoom | None = None,
) -> Iterator[tuple[RequestPipeline, VersionManager]]:
    """Loads the models into this process. Yields the pipeline that serves them, and the manager
    that switches their versions. ``versions`` and ``deltas``, the followed ones, are emptied, so
    that their memory is given back once others are served. A worker has ``counters``, which have
    ``room``."""
    from embedserve.processes import server
    from embedserve.processes.next_version import as_restored

    worker = counters.worker if counters else 0
    is_shown, shards = worker == 0, None
    engines: Mapping[str, AnyEngine]
    if settings.shards:
        from embedserve.fanout.shards import Shards

        shards = Shards(settings)
        engines = shards.open_all(versions, is_shown=is_shown)
    else:
        settings = on_devices(settings, versions, is_shown=is_shown)
        engines = restore_all(settings, versions, deltas, is_shown=is_shown)
    restored = {
        name: as_restored(name, versions.pop(name), engine, deltas.pop(name, None), worker, shards)
        for name, engine in engines.items()
    }
    threads = server.executor_threads(settings, engines.values())
    readers = [one.rows_reader for one in engines.values() if one.spare_rows is not None]
    infos = [info for _, _, info in restored.values()]
    with ThreadPoolExecutor(threads, thread_name_prefix="lookup") as executor, uploading(readers):
        pipeline = server.build_pipeline(infos, settings, counters, room, shards)
        manager = server.build_version_manager(
            pipeline, restored, settings, executor, worker, shards
        )
        del engines, restored, infos  # the version manager and the batchers release them
        yield pipeline, manager


def _log_ready(
    pipeline: RequestPipeline, ports: Ports, start_s: float, settings: ServeSettings
) -> None:
    log_ready(pipeline.models.models(), ports, time.perf_counter() - start_s, settings)


def _serve_workers(settings: ServeSettings, start_s: float, notify: Notify) -> None:
    keys = _trusted_keys(settings)
    ports = _claimed(settings).share()
    with contextlib.ExitStack() as stack:
        stack.callback(ports.close)
        end_startup_server = stack.enter_context(serve_health_while_loading(settings, ports))
        opened = opened_in_time(settings, open_versions_to_fork)
        settings = with_default_model(settings, opened)
        delta_versions = _delta_versions(settings, opened)
        # In this process only adopt changes the dict. Each worker is forked with a copy, and its
        # VersionManager changes that.
        versions = make_resident_and_verify(settings, opened, delta_versions.served)
        del opened
        selection = row_selection(settings)
        room = CounterRoom.of(versions.values(), settings)
        shared_counters = SharedCounters(settings.workers, room.cells)

        def find_damage() -> str:
            try:
                for version in versions.values():
                    version.tables.check_unchanged()
            except StoreError as error:
                return str(error)
            return ""

        def adopt(name: str, path: str | None) -> None:
            if path is None:
                versions.pop(name, None)
                delta_versions.remove(name)
            else:
                versions[name] = delta_versions.activate(name) or open_folder(path, selection)

        def on_stop() -> None:
            notify("STOPPING=1")
            ports.remove_files()

        served = {name: RolloutVersion.of(one) for name, one in versions.items()}
        supervisor = Supervisor(
            partial(
                _worker_main,
                settings,
                versions,
                delta_versions,
                ports,
                start_s,
                shared_counters,
                room,
            ),
            shared_counters,
            settings.drain_s,
            settings.worker_hang_s,
            RolloutCoordinator(served, adopt, delta_versions),
            find_damage,
            end_startup_server=end_startup_server,
            on_ready=partial(notify, "READY=1"),
            on_stop=on_stop,
            applier_main=(
                partial(_applier_main, settings, versions, delta_versions, keys)
                if settings.deltas != "none"
                else None
            ),
        )
        supervisor.run()


def _trusted_keys(settings: ServeSettings) -> TrustedKeys | None:
    """Returns the keys of settings.delta_key; None without it. Raises StoreError if they cannot be
    used."""
    if settings.deltas == "none" or not settings.delta_key:
        return None
    from embedserve_store.deltas.signing import trusted_keys

    return trusted_keys(settings.delta_key)


def _delta_versions(settings: ServeSettings, versions: Versions) -> DeltaVersions:
    """Returns the versions that are followed; none without --deltas. The tables of ``versions`` are
    replaced by those with room for changed rows.

    Raises:
        StoreError: there is no memory for the changed rows, or the rows of a stored plan cannot
            change and settings.strict_plan is set.
    """
    if settings.deltas == "none":
        return DeltaVersions(settings, {})
    deltas = {name: make_shared_state(settings, version) for name, version in versions.items()}
    for name, shared in deltas.items():
        versions[name] = shared.live.version
    return DeltaVersions(settings, deltas)


def _applier_main(
    settings: ServeSettings,
    versions: Versions,
    delta_versions: DeltaVersions,
    keys: TrustedKeys | None,
    supervisor: socket.socket,
) -> int:
    """Applies deltas in the applier's process; returns the exit code."""
    from embedserve.deltas.applier_process import run_applier

    check_on_device = None
    if settings.devices == "cuda":
        from embedserve.engine.cuda_limits import check_changed_rows

        check_on_device = check_changed_rows
    versions.clear()  # in this process, so that the memory of versions is given back
    try:
        run_applier(settings, delta_versions.take(), open_folder, supervisor, check_on_device, keys)
    except StoreError as error:
        logger.error("%s", error)
    return 1


def _worker_main(
    settings: ServeSettings,
    versions: Versions,
    delta_versions: DeltaVersions,
    ports: Ports,
    start_s: float,
    shared_counters: SharedCounters,
    room: CounterRoom,
    index: int,
    channel: socket.socket,
) -> int:
    """Serves as worker ``index``, in its forked process; returns the exit code."""
    from embedserve.processes import worker

    counters = WorkerCounters(shared_counters, index)
    try:
        # No variable holds what ``take`` returns: _loaded empties ``deltas`` to free its memory.
        deltas = {to.name: state for to, state in delta_versions.take().items() if not to.is_next}
        with _loaded(settings, versions, deltas, counters, room) as (pipeline, manager):
            import uvloop

            ready = partial(_log_ready, pipeline, ports, start_s, settings)
            uvloop.run(
                worker.run_worker(pipeline, manager, settings, ports, ready, counters, channel)
            )
    except (StoreError, OSError, ValueError, ImportError, MemoryError, RuntimeError) as error:
        # A package of the engine may not load.
        is_ours = isinstance(error, ImportError) and (error.name or "").startswith("embedserve")
        is_ours |= isinstance(error, RuntimeError) and not is_process_limit(error)
        if is_ours or (isinstance(error, ValueError) and type(error) is not ValueError):
            raise
        worker.report_failure(channel, error)
        return 1
    return 0
