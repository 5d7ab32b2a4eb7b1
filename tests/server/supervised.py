"""A supervised server over the fake engine, for the tests of workers.

Its arguments are WORKERS DRAIN_S LOOKUP_S HANG_S FILE. Workers that have not ended are killed
twice DRAIN_S after their stop began, or sooner. The server prints its ports when it is ready. A
worker prints a line when it starts, and hangs on SIGUSR1.

Files control it:

- While FILE exists, workers fail with its content as the message.
- FILE.sock is a Unix socket on which the server also listens.
- If FILE.asked exists, the supervisor prints whether a worker responds before it knows that the
  worker is ready.
- While FILE.full exists, no process can be forked.
- FILE.deltas adds an applier. It polls once that file is empty, or ends if the file says "end". It
  sends no heartbeat after that poll, and counts as hung after HANG_S, like a worker.
"""

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

from embedserve.config import ServeSettings
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.status import SharedDeltaState
from embedserve.deltas.version_memory import VersionMemory
from embedserve.metrics.metrics import CounterRoom
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters
from embedserve.processes import applier_supervision, supervisor
from embedserve.processes.logging_setup import set_up_logging
from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.rollout.delta_versions import DeltaVersions
from embedserve.processes.startup.ports import Ports, claim_ports
from embedserve.processes.supervisor import Supervisor, WorkerFailedError
from embedserve_store.format.delta_manifest import LinePosition

ANSWER_S = 1.0


def serve(
    channel: socket.socket,
    counters: WorkerCounters,
    ports: Ports,
    settings: ServeSettings,
    lookup_s: float,
) -> None:
    import uvloop
    from server.fake_engine import FakeEngine
    from server.pipelines import IN_THREAD, make_pipeline

    from embedserve.processes import worker
    from embedserve.processes.rollout.version_manager import VersionManager

    signal.signal(signal.SIGUSR1, hang_here)
    engine = FakeEngine()
    engine.delay_s = lookup_s
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(engine, executor=executor, limits=IN_THREAD, counters=counters)

        def log_ready() -> None:
            write_line("ready", ports.http, ports.grpc)

        manager = VersionManager(pipeline, {}, executor, 1, do_not, do_not)
        uvloop.run(
            worker.run_worker(pipeline, manager, settings, ports, log_ready, counters, channel)
        )


def do_not(*args: object) -> NoReturn:
    """Stands for functions that only a rollout calls; raises NotImplementedError."""
    raise NotImplementedError


def write_line(*words: object) -> None:
    """Writes a line at once. print would write it in pieces, and other processes between them."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def hang_here(*args: object) -> None:
    time.sleep(1000)


def answers(port: int) -> bool:
    """Whether the server responds to a request within ANSWER_S."""
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.sendall(b"GET /health/live HTTP/1.1\r\nHost: test\r\n\r\n")
        caller.settimeout(ANSWER_S)
        try:
            return bool(caller.recv(1))
        except TimeoutError:
            return False


def forking_unless(full: Path) -> Callable[[], int]:
    """Returns an os.fork that fails while ``full`` exists."""
    fork = os.fork

    def fork_unless_full() -> int:
        if full.exists():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    return fork_unless_full


def main(workers: int, drain_s: float, lookup_s: float, hang_s: float, failure: Path) -> None:
    set_up_logging("info")
    os.fork = forking_unless(Path(f"{failure}.full"))
    settings = ServeSettings(store="", drain_s=drain_s, workers=workers, allowed_host=("*",))
    unix = [(f"{failure}.sock", 0o600, "HTTP")]
    ports = claim_ports("127.0.0.1", 0, 0, unix=unix).share()
    slots = SharedCounters(workers, CounterRoom(1, COLUMNS_MIN).cells)

    def end_startup_server() -> None:
        if Path(f"{failure}.asked").exists():
            write_line("answered" if answers(ports.http) else "waited")

    def worker_main(index: int, channel: socket.socket) -> int:
        write_line("started", index)
        if failure.exists():
            from embedserve.processes.worker import report_failure

            report_failure(channel, ValueError(failure.read_text()))
            return 3
        serve(channel, WorkerCounters(slots, index), ports, settings, lookup_s)
        return 0

    applier_supervision.HANG_S_MIN = hang_s
    supervisor.KILL_AFTER_S = min(supervisor.KILL_AFTER_S, drain_s)
    mode = Path(f"{failure}.deltas")

    live = SimpleNamespace(
        clear_cell=lambda worker: None,
        version=SimpleNamespace(at_seq=None, manifest=SimpleNamespace(version=1)),
        start=LinePosition(1, 0, "0" * 64),
        memory=VersionMemory.create(),
    )
    shared = SharedDeltaState(cast("LiveRows", live))
    status = shared.status

    def applier_main(supervisor: socket.socket) -> int:
        write_line("applier", os.getpid(), status.read().state)
        if mode.read_text() == "end":
            return 3
        while mode.read_text():
            time.sleep(0.01)
        status.write(replace(status.read(), is_ready=True, state="following", reason=""))
        supervisor.send(b"\n")
        supervisor.recv(1)
        return 0

    followed = {"m": shared} if mode.exists() else {}
    try:
        Supervisor(
            worker_main,
            slots,
            drain_s,
            hang_s,
            RolloutCoordinator({}, lambda *_: None, DeltaVersions(settings, followed)),
            lambda: "tables are cut off",
            end_startup_server=end_startup_server,
            on_stop=ports.remove_files,
            applier_main=applier_main if mode.exists() else None,
        ).run()
    except WorkerFailedError as error:
        sys.exit(f"failed: {error}")
    finally:
        ports.close()
    heavy = [name for name in ("torch", "grpc", "uvloop") if name in sys.modules]
    print("imported:", *heavy, flush=True)


if __name__ == "__main__":
    drain_s, lookup_s, hang_s = map(float, sys.argv[2:5])
    main(int(sys.argv[1]), drain_s, lookup_s, hang_s, Path(sys.argv[5]))
