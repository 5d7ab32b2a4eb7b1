"""make soak: load, overload, kills, hangs, restarts and abusive clients at once, for an hour or
more.

Client processes count their requests and the outcomes. Only requests held by a killed worker may be
lost, and no response may be wrong. Memory and the latencies of a calm neighbour must stay stable.
Prints one table, and draws latencies, memory and rates over time.

    make soak SOAK="--minutes 60 --seed 7 --output folder"
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from random import Random
from threading import Thread

from long_runs import chosen
from soak import abusive_clients, load
from soak.embeds import publish
from soak.faults import HANG, KILL, RESTART, Faults, Servers, planned
from soak.report import Report, draw_report, judge, print_table
from soak.tally import ClientContext, Phases, Tally
from soak.watch import EVERY_S, Watch

AN_HOUR = {KILL: 20, HANG: 10, RESTART: 20}
PHASE_S_MAX = 30.0
PHASES_MIN = 4
START_S_MAX = 240.0
END_S_MAX = 180.0
"""Seconds for clients to stop, which wait for their last responses."""
WAIT_S = 0.2
LOSSES_MAX = 10_000


def an_hours_share(minutes: float) -> dict[str, int]:
    """Returns the number of faults of each kind, at least one."""
    return {kind: max(1, round(count * minutes / 60)) for kind, count in AN_HOUR.items()}


class Clients:
    """The client processes.

    Attributes:
        tally, rude: counts so far.
    """

    def __init__(self, context: SpawnContext, site: ClientContext, seed: int) -> None:
        self._context = context
        self._site = site
        self._seed = seed
        self._processes: list[SpawnProcess] = []
        self._open: list[Connection] = []

    def start(self) -> float:
        """Starts all processes, and returns the measured capacity once they are ready."""
        capacity = self._start("load", self._site)
        self._start("neighbour", replace(self._site, is_timed=True))
        self._start("rude", self._site)
        return capacity

    def begin(self, phases: Phases) -> None:
        for process in self._open:
            process.send(phases)

    def _start(self, role: str, site: ClientContext) -> float:
        ours, theirs = self._context.Pipe()
        arguments = (site, theirs, self._seed)
        if role == "rude":
            process = self._context.Process(target=abusive_clients.run, args=arguments)
        else:
            process = self._context.Process(target=load.run, args=(role, *arguments))
        process.start()
        theirs.close()
        self._processes.append(process)
        self._open.append(ours)
        if not ours.poll(START_S_MAX):
            raise TimeoutError(f"{role} is not ready in {START_S_MAX:g} s")
        capacity = ours.recv()
        assert isinstance(capacity, float)
        return capacity

    @property
    def are_open(self) -> bool:
        return bool(self._open)

    def hear(self, report: Report) -> None:
        """Adds the counts that arrive within a moment."""
        for ready in wait(self._open, WAIT_S):
            assert isinstance(ready, Connection)
            try:
                said = ready.recv()
            except EOFError:
                report.wrong.append("a process of clients ended before its time")
                said = None
            if said is None:
                self._open.remove(ready)
            elif isinstance(said, Tally):
                report.watch.add(time.monotonic(), said)
                report.tally.add(said)
            else:
                report.rude.update(said)

    def end(self) -> None:
        for process in self._processes:
            process.join(END_S_MAX)
            if process.is_alive():
                process.terminate()


def soak(folder: Path, seconds: float, seed: int, counts: dict[str, int]) -> Report:
    """Runs the soak for ``seconds``, or longer if the faults take longer. Returns the report."""
    context = multiprocessing.get_context("spawn")
    random = Random(seed)
    site = ClientContext(context.Array("i", 2), context.Event(), Phases(0.0, 1.0), random)
    with _servers(folder, site) as servers, _clients(context, site, seed) as clients:
        capacity = clients.start()
        each_s = min(PHASE_S_MAX, seconds / PHASES_MIN)
        phases = Phases(time.monotonic(), each_s)
        watch = Watch(servers, phases)
        faults = Faults(servers, phases, random)
        report = Report(phases, counts, capacity, watch, faults.done, servers.logs)
        clients.begin(phases)
        plan = planned(random, counts, phases, seconds)
        _watch(report, clients, faults, plan, seconds)
        site.stop.set()
        end_s = time.monotonic() + END_S_MAX
        while clients.are_open:
            if time.monotonic() > end_s:
                report.wrong.append(f"clients still wait {END_S_MAX:g} s after the stop")
                break
            clients.hear(report)
    if set(servers.stopped) != {0}:
        report.wrong.append(f"servers ended with {servers.stopped}")
    judge(report)
    return report


def _watch(
    report: Report,
    clients: Clients,
    faults: Faults,
    plan: list[tuple[float, str]],
    seconds: float,
) -> None:
    """Waits until the time is over and all faults are done, or until too many requests are lost."""

    def act() -> None:
        try:
            faults.run(plan)
        except Exception as error:
            report.wrong.append(f"{type(error).__name__}: {error}")

    acting = Thread(target=act)
    acting.start()
    start_s = report.phases.start_s
    look_s = start_s
    try:
        while acting.is_alive() or time.monotonic() < start_s + seconds:
            clients.hear(report)
            if time.monotonic() >= look_s:
                report.watch.look(time.monotonic())
                look_s += EVERY_S
            if len(report.tally.losses) > LOSSES_MAX:
                report.wrong.append("ended early, for its losses")
                break
    finally:
        faults.stop.set()
        acting.join()
    report.seconds = time.monotonic() - start_s


@contextmanager
def _servers(folder: Path, site: ClientContext) -> Iterator[Servers]:
    servers = Servers(publish(folder), folder, site.route)
    try:
        servers.start()
        yield servers
    finally:
        while servers.now:
            servers.stop_oldest()


@contextmanager
def _clients(context: SpawnContext, site: ClientContext, seed: int) -> Iterator[Clients]:
    clients = Clients(context, site, seed)
    try:
        yield clients
    finally:
        site.stop.set()
        clients.end()


def main() -> None:
    run = chosen("soak", "Asks a server of its own for an hour.", minutes=60.0)
    report = soak(run.folder, 60 * run.minutes, run.seed, an_hours_share(run.minutes))
    print_table(report)
    draw_report(report, run.folder / "soak.png")
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
