"""Outcome of a soak of deltas, and how it is printed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

CALM_S = 10.0
"""Seconds after a kill that do not count for the lag, and after an undo of more deltas than the
server keeps in memory, whose lags count apart: their rows are read from the store."""


@dataclass
class Report:
    """Outcome of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    """Lag at each sample that is not soon after a kill or an undo past the memory."""
    undo_lags_s: list[float] = field(default_factory=list)
    """Lag at each sample soon after an undo past the memory."""
    memory: list[int] = field(default_factory=list)
    """Bytes of changed rows at each sample."""
    supervised: list[int] = field(default_factory=list)
    """Private bytes of all processes of the server at each sample."""


def print_report(report: Report) -> None:
    for what, count in sorted(report.counts.items()):
        print(f"{count:10,} {what}")
    for when, lags_s in (
        ("", report.lags_s),
        (" soon after undos past the memory", report.undo_lags_s),
    ):
        p99_s, most_s = np.quantile(lags_s or [0], 0.99), max(lags_s, default=0)
        print(
            f"lag{when}, but for {CALM_S:g} s after a kill: p99 {p99_s:.2f} s, "
            f"at most {most_s:.2f} s"
        )
    for name, samples in (("changed rows", report.memory), ("processes", report.supervised)):
        thirds = [max(one) / 1e6 for one in np.array_split(samples, 3)]
        print(f"memory of {name}: {', '.join(f'{one:.0f}' for one in thirds)} MB in each third")
    print(f"wrong: {len(report.wrong)}")
    for one in report.wrong[:20]:
        print("  ", one)
