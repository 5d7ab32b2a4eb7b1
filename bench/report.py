"""Renders the results of a run as tables, JSON and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import Row

Results = Mapping[str, Sequence[Row]]
References = Mapping[str, Mapping[str, float]]


def tables(results: Results, references: References) -> str:
    parts = []
    for label, rows in results.items():
        parts += [f"## {label}", "", _references(references[label]), ""]
        parts += ["| server | connections | requests/s | p50 ms | p99 ms | max ms |"]
        parts += ["| --- | --- | --- | --- | --- | --- |"]
        ordered = sorted(
            rows, key=lambda row: (row.connections * row.streams == 1, -row.figures.rate)
        )
        parts += [_line(row) for row in ordered]
        parts += [""]
    return "\n".join(parts)


def _references(reference: Mapping[str, float]) -> str:
    said = ", ".join(f"{name} {ms:.3f} ms" for name, ms in reference.items())
    return f"One request in one process: {said}."


def _line(row: Row) -> str:
    at_once = f"{row.connections}" if row.streams == 1 else f"{row.connections} x {row.streams}"
    figures = row.figures
    latencies = (figures.p50_ms, figures.p99_ms, figures.max_ms)
    shown = " | ".join("" if one is None else f"{one:.2f}" for one in latencies)
    return f"| {title(row)} | {at_once} | {figures.rate:,.0f} | {shown} |"


def operations(found: Mapping[str, Mapping[str, Any]]) -> str:
    parts = []
    for name, figures in found.items():
        parts += [f"## {name}", "", "| | |", "| --- | --- |"]
        parts += [f"| {label} | {_figure(value)} |" for label, value in _flat(figures)]
        parts += [""]
    return "\n".join(parts)


def _flat(figures: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for label, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{label}: ")
        else:
            yield before + label.replace("_", " "), value


def _figure(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_figure, value))
    return "-" if value is None else f"{value:,.2f}".removesuffix(".00")


def title(row: Row) -> str:
    return row.server if row.way in row.server else f"{row.server}, {row.way}"


def as_json(results: Results, references: References) -> dict[str, Any]:
    return {
        label: {
            "references_ms": references[label],
            "rows": [
                {
                    "server": row.server,
                    "way": row.way,
                    "connections": row.connections,
                    "streams": row.streams,
                    **row.figures.as_dict(),
                }
                for row in rows
            ],
        }
        for label, rows in results.items()
    }


def picture(results: Results, path: Path) -> None:
    """Draws bars of the rates of each workload, and lines from the median latency to the 99th
    percentile."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {label: _best(rows) for label, rows in results.items()}
    heights = [0.9 + 0.24 * len(rows) for rows in shown.values()]
    figure, axes = plt.subplots(
        len(shown), 2, figsize=(12, sum(heights)), height_ratios=heights, squeeze=False
    )
    for (label, rows), (rates, latencies) in zip(shown.items(), axes, strict=True):
        names = [title(row) for row in rows]
        colors = [_color(row) for row in rows]
        rates.barh(names, [row.figures.rate for row in rows], color=colors)
        rates.set_title(f"{label}: requests/s", loc="left", fontsize=10)
        for place, (row, color) in enumerate(zip(rows, colors, strict=True)):
            p50, p99 = row.figures.p50_ms, row.figures.p99_ms
            if p50 is not None and p99 is not None:
                latencies.plot([p50, p99], [place, place], color=color, linewidth=2)
                latencies.plot([p50], [place], "o", color=color)
                latencies.plot([p99], [place], "|", color=color, markersize=10)
        latencies.set_ylim(rates.get_ylim())
        latencies.set_yticks([])
        latencies.set_xscale("log")
        latencies.xaxis.set_major_formatter("{x:g}")
        latencies.xaxis.set_minor_formatter("")
        latencies.set_title("p50 (dot) to p99 (line), ms", loc="left", fontsize=10)
        for axis in (rates, latencies):
            axis.tick_params(labelsize=8)
            axis.grid(axis="x", alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _best(rows: Sequence[Row]) -> list[Row]:
    """Returns each server and way once, at its fastest concurrency, slowest first."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.server, row.way)
        if key not in best or row.figures.rate > best[key].figures.rate:
            best[key] = row
    return sorted(best.values(), key=lambda row: row.figures.rate)


def _color(row: Row) -> str:
    if row.server.startswith("embedserve"):
        return "#1565c0"
    return "#bdbdbd" if row.server.startswith("constant") else "#ef6c00"
