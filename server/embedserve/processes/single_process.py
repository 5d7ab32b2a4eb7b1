"""Runs a server of one process, with the rollout coordinator in that process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from embedserve.config import ServeSettings
from embedserve.pipeline import RequestPipeline
from embedserve.processes.rollout.agent import RolloutAgent
from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.rollout.messages import Desired, Report
from embedserve.processes.rollout.served_name import RolloutVersion
from embedserve.processes.rollout.store_watcher import apply_initial_alias_settings
from embedserve.processes.rollout.version_manager import VersionManager
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve.processes.server import run_server, stop_or_end
from embedserve.processes.startup.ports import Ports


async def run_single_process(
    pipeline: RequestPipeline,
    version_manager: VersionManager,
    settings: ServeSettings,
    ports: Ports,
    end_startup_server: Callable[[], None],
    log_ready: Callable[[], None],
    on_drain: Callable[[], None],
) -> None:
    """Serves until SIGTERM or SIGINT, then drains.

    Args:
        end_startup_server: called once this process can respond to probes itself. Before that it
            may wait for shards and for the store.
        log_ready: called once the server accepts requests.
        on_drain: called when the drain begins.

    Raises:
        OSError, ValueError: as in run_server.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_or_end, stop, number)
    await version_manager.start()
    agent = start_rollouts(settings, version_manager, stop)
    loop.add_signal_handler(signal.SIGHUP, agent.admin.reload)
    await apply_initial_alias_settings(settings, version_manager)
    end_startup_server()
    await run_server(stop, pipeline, settings, ports, log_ready, agent.admin, on_drain)


def start_rollouts(
    settings: ServeSettings, version_manager: VersionManager, stop: asyncio.Event
) -> RolloutAgent:
    """Returns the agent of this process, connected to a coordinator as its only worker.

    A rollout has no time limit here: only a supervisor calls ``advance_rollout``, for workers that
    have prepared a version and wait for another.
    """
    loop = asyncio.get_running_loop()
    resolver = VersionResolver(settings, version_manager.why_not_yet)
    version_manager.open_version = lambda name, target: resolver.take_opened(name, target.version)
    served = {name: RolloutVersion.of(one) for name, one in version_manager.versions.items()}
    coordinator = RolloutCoordinator(served, adopt=lambda name, path: None)

    # Both directions go through the event loop, as through a channel: neither side is called while
    # it calls the other.
    def send(report: Report) -> None:
        loop.call_soon(coordinator.on_report, 0, report)

    agent = RolloutAgent(settings, version_manager, send, stop, resolver)

    def send_desired(worker: int, desired: Desired) -> None:
        loop.call_soon(agent.apply, desired)

    coordinator.send = send_desired
    coordinator.on_worker_start(0, version_manager.status())
    return agent
