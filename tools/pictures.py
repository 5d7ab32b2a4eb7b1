"""Draws measurements over time, if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COLOURS = {"kill": "tab:red", "hang": "tab:purple", "restart": "tab:green"}


@dataclass(frozen=True)
class Panel:
    """Curves over the same times.

    Attributes:
        curves: values by name. The names form the legend, which a single curve has not.
    """

    label: str
    curves: Mapping[str, Sequence[float]]
    is_log: bool = False


def draw(
    path: Path,
    seconds: Sequence[float],
    panels: Sequence[Panel],
    shaded: Iterable[tuple[float, float]] = (),
    marks: Iterable[tuple[float, str]] = (),
) -> None:
    """Draws panels one above the other, with ``shaded`` spans of time and ``marks`` at points in
    time."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed (make bench installs it)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(9, 2.5 * len(panels))
    )
    marks, shaded = list(marks), list(shaded)
    for (axis,), panel in zip(axes, panels, strict=True):
        for start_s, end_s in shaded:
            axis.axvspan(start_s, end_s, color="0.92")
        for at_s, kind in marks:
            axis.axvline(at_s, color=COLOURS.get(kind, "0.5"), linewidth=0.8, linestyle=":")
        for name, values in panel.curves.items():
            axis.plot(seconds, values, label=name)
        axis.set_ylabel(panel.label)
        if panel.is_log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        if len(panel.curves) > 1:
            axis.legend(loc="upper right", fontsize="small")
    axes[-1][0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    print(f"picture: {path}")
