"""Evaluates a soak: failures, a table, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from pictures import Panel, draw
from soak.faults import HANG, KILL, RESTART, Fault
from soak.load import GRPCIO, GRPCIO_CLIENTS, LARGE_KIND
from soak.tally import Phases, Tally
from soak.watch import EVERY_S, Watch, drift

GRPCIO_LOST_MAX = 2 * GRPCIO_CLIENTS
"""Calls that grpcio's clients may lose with one worker. Each client has one pending call, and its
next call may meet the dying socket. The connections of these calls are not known."""
P99_TIMES_MAX, P99_MORE_MS = 3.0, 20.0
"""Bound of the last quarter's p99 relative to the second quarter's, because the machine may have
other work."""
GROWTH_MB_MAX = 48.0
"""MiB by which a worker may grow."""
OVERLOAD_MIN, OVERLOAD_S_MIN = 4.0, 60.0
"""Offered load relative to the answered load, at least, once there were that many seconds of
overload."""
YOUNG = int(60 / EVERY_S)
"""Samples of a process until it has met every kind of load."""
SAID_MAX = 20
SAID_CHARACTERS_MAX = 500


@dataclass
class Report:
    """Load, faults and measurements of a soak.

    Attributes:
        planned: number of faults by kind.
        capacity: large requests per second that the server answers.
        rude: counts of abusive acts.
        wrong: failures.
    """

    phases: Phases
    planned: dict[str, int]
    capacity: float
    watch: Watch
    faults: list[Fault]
    logs: list[Path]
    tally: Tally = field(default_factory=Tally)
    rude: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def offered(self) -> float:
        """Large requests per second that were sent during overload."""
        return self.tally.sent[LARGE_KIND] / max(self.tally.overload_s, 1e-9)

    @property
    def taken(self) -> float:
        """Large requests per second that were answered during overload."""
        return self.tally.answered[LARGE_KIND] / max(self.tally.overload_s, 1e-9)

    @property
    def spans(self) -> list[tuple[float, float]]:
        return [(fault.at_s, fault.whole_s) for fault in self.faults]

    def p99s(self, is_overload: bool) -> list[float]:
        """Returns the neighbour's p99 in ms of each undisturbed sample of the phases."""
        return [sample.p99_ms for sample in self.watch.of_phase(is_overload, self.spans)]

    def worker_mb(self, is_overload: bool) -> list[float]:
        """Returns the median worker's memory in MiB, of the same samples."""
        return [
            median(sorted(sample.memory_mb.values())[-2:])
            for sample in self.watch.of_phase(is_overload, self.spans)
            if len(sample.memory_mb) >= 3
        ]

    def growth_mb(self) -> float:
        """Returns the largest growth of a process in MiB, from the second quarter of its life to
        the last, without its first minute."""
        lives: dict[int, list[float]] = {}
        for sample in self.watch.samples:
            for pid, nbytes in sample.memory_mb.items():
                lives.setdefault(pid, []).append(nbytes)
        found = [between for life in lives.values() if (between := drift(life[YOUNG:]))]
        return max((last - second for second, last in found), default=0.0)


def judge(report: Report) -> None:
    """Adds all failures to ``report.wrong``, and assigns each loss to its fault."""
    report.watch.finish()
    report.wrong += [*_losses(report), *_counts(report), *_logs(report), *_trends(report)]
    for what, count in Counter(report.tally.wrong).items():
        report.wrong.append(what if count == 1 else f"{what} ({count} times)")


def _losses(report: Report) -> Iterator[str]:
    for loss in report.tally.losses:
        fault = next((one for one in report.faults if one.explains(loss)), None)
        if fault is None:
            since_s = loss.at_s - report.phases.start_s
            yield f"lost at {since_s:.2f} s: {loss}"
        else:
            fault.lost[loss.kind] = fault.lost.get(loss.kind, 0) + loss.count
    for fault in report.faults:
        if fault.lost.get(GRPCIO, 0) > GRPCIO_LOST_MAX:
            yield f"grpcio lost {fault.lost[GRPCIO]} with one worker"


def _counts(report: Report) -> Iterator[str]:
    tally, lost = report.tally, report.tally.lost()
    for kind, sent in tally.sent.items():
        known = tally.answered[kind] + tally.refused[kind] + tally.not_taken[kind] + lost[kind]
        if sent != known:
            yield f"{kind}: {sent} sent, and it is known of {known} what came of them"
        if not tally.answered[kind]:
            yield f"{kind}: none was answered"
    done = Counter(fault.kind for fault in report.faults if fault.whole_s)
    for kind, count in report.planned.items():
        if done[kind] != count:
            yield f"{kind}: {count} planned, {done[kind]} done"
    if tally.overload_s > OVERLOAD_S_MIN and report.offered < OVERLOAD_MIN * report.taken:
        yield f"the overload was {report.offered / report.taken:.1f} times what was answered"
    if not tally.refused[LARGE_KIND]:
        yield "there was no overload: nothing was refused"


def _logs(report: Report) -> Iterator[str]:
    text = "\n".join(log.read_text(errors="replace") for log in report.logs)
    for bad in ("Traceback", "a request failed"):
        if bad in text:
            at = text.index(bad)
            yield f"the server's log: …{text[max(0, at - 200) : at + 1500]}"
    hangs, ends = text.count("hangs: no heartbeat"), text.count("was ended by")
    if hangs != report.planned[HANG]:
        yield f"{hangs} workers hung, {report.planned[HANG]} of them stopped by us"
    if ends != report.planned[HANG] + report.planned[KILL]:
        yield f"{ends} workers ended, {report.planned[HANG] + report.planned[KILL]} of them by us"


def _trends(report: Report) -> Iterator[str]:
    p99 = drift(report.p99s(is_overload=False))
    if p99 and p99[1] > P99_TIMES_MAX * p99[0] + P99_MORE_MS:
        yield f"the neighbour's p99 rose from {p99[0]:.1f} to {p99[1]:.1f} ms"
    for is_overload in (False, True):
        memory = drift(report.worker_mb(is_overload))
        if memory and memory[1] - memory[0] > GROWTH_MB_MAX:
            yield f"workers grew from {memory[0]:.0f} to {memory[1]:.0f} MB"
    if report.growth_mb() > GROWTH_MB_MAX:
        yield f"a process grew by {report.growth_mb():.0f} MB"


def print_table(report: Report) -> None:
    tally, lost = report.tally, report.tally.lost()
    head = ("sent", "answered", "refused", "not taken", "lost")
    print(f"{'requests':20}" + "".join(f"{one:>12}" for one in head))
    for kind in [*sorted(tally.sent), "all"]:
        counts = (
            (counter.total() if kind == "all" else counter[kind])
            for counter in (tally.sent, tally.answered, tally.refused, tally.not_taken, lost)
        )
        print(f"{kind:20}" + "".join(f"{count:>12,}" for count in counts))
    columns = ("done", "overload", "longest, s", "lost")
    print(f"\n{'faults':20}" + "".join(f"{one:>12}" for one in columns) + "  most with one")
    for kind in (KILL, HANG, RESTART):
        faults = [fault for fault in report.faults if fault.kind == kind]
        figures = (
            f"{len(faults)}",
            f"{sum(fault.is_overload for fault in faults)}",
            f"{max((fault.whole_s - fault.at_s for fault in faults), default=0.0):.1f}",
            f"{sum(sum(fault.lost.values()) for fault in faults)}",
        )
        worst = max((fault.lost for fault in faults), key=lambda one: sum(one.values()), default={})
        said = ", ".join(f"{count} {name}" for name, count in sorted(worst.items()))
        print(f"{kind:20}" + "".join(f"{one:>12}" for one in figures) + f"  {said}")
    _print_figures(report)
    print(f"wrong: {len(report.wrong)}")
    for one in report.wrong[:SAID_MAX]:
        print("  ", one[:SAID_CHARACTERS_MAX])


def _print_figures(report: Report) -> None:
    rude = ", ".join(f"{count} {name}" for name, count in sorted(report.rude.items()))
    print(f"\nrude: {report.rude.total():,}: {rude}")
    print(f"took {report.seconds:.0f} s, {report.tally.overload_s:.0f} of them overload: "
          f"{report.offered:.0f} large requests a second, {report.offered / report.capacity:.1f} "
          f"times what the server answers without others, {report.taken:.0f}"
          f" answered, {report.tally.unsent:,} not sent for want of a connection")  # fmt: skip
    for name, is_overload in (("calm", False), ("overload", True)):
        p99s, memory = report.p99s(is_overload), report.worker_mb(is_overload)
        if p99s:
            print(f"{name}: the neighbour's p99 {median(p99s):.1f} ms{_quarters(p99s)}; a worker's "
                  f"memory {median(memory or [0]):.0f} MB{_quarters(memory)}")  # fmt: skip
    print(f"most that a process grew: {report.growth_mb():.0f} MB")


def _quarters(values: list[float]) -> str:
    between = drift(values)
    return f" ({between[0]:.1f}, then {between[1]:.1f})" if between else ""


def draw_report(report: Report, path: Path) -> None:
    samples, phases = report.watch.samples, report.phases
    seconds = [number * EVERY_S for number in range(len(samples))]
    turns = range(1, int(seconds[-1] / phases.each_s) + 1, 2)
    panels = [
        Panel(
            "neighbour waits, ms",
            {
                "slowest": [sample.slowest_ms for sample in samples],
                "p99": [sample.p99_ms for sample in samples],
            },
            is_log=True,
        ),
        Panel(
            "memory, MB",
            {
                "all processes": [sum(sample.memory_mb.values()) for sample in samples],
                "largest": [max(sample.memory_mb.values(), default=0.0) for sample in samples],
            },
        ),
        Panel(
            "requests/s",
            {
                "refused": [sample.refused / EVERY_S for sample in samples],
                "answered": [sample.answered / EVERY_S for sample in samples],
            },
        ),
    ]
    shaded = [(turn * phases.each_s, (turn + 1) * phases.each_s) for turn in turns]
    marks = [(fault.at_s - phases.start_s, fault.kind) for fault in report.faults]
    draw(path, seconds, panels, shaded, marks)
