"""Generates docs/settings.md and docs/metrics.md from the code; run by `make docs`.

A setting is described by its field in config.py, and a metric by its row in metrics/families.py.
Corrections of these pages belong there. It also converts Prometheus' rules to the Kubernetes
resource with the same rules. A test compares the committed files with the generated ones.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, Metric, PlatformCollector

from embedserve.access.authenticator import UNKNOWN
from embedserve.config import DEFAULT_LIMITS, Limits, ServeSettings
from embedserve.metrics.caller_metrics import CALLERS_MAX, OTHERS
from embedserve.metrics.families import FAMILIES, Family
from embedserve.metrics.histogram import COUNT_BUCKETS, LOOKUP_SECONDS_BUCKETS, SECONDS_BUCKETS
from embedserve.metrics.metrics import PROTOCOLS
from embedserve.metrics.request_metrics import OUTCOMES
from embedserve.metrics.tls import HANDSHAKE_OUTCOMES
from embedserve.processes.memory_bounds import CONNECTION_TLS_BYTES, memory_bytes_max, memory_parts
from embedserve_store.terminal.sizes import human_bytes

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy" / "monitoring" / "rules.yaml"
MADE_BY = "<!-- Made by docs/generate.py (make docs) out of {source}: change that instead. -->"

SETTINGS_HEAD = """# Settings of `embedserve serve`

Each is a flag, an environment variable, or a key of the TOML file that `--config FILE`
(`EMBEDSERVE_CONFIG`) names; the first of these wins. An unknown key, or a value that is out of
bounds, stops the start with one line that names it.

    embedserve serve store --http-port 8010
    EMBEDSERVE_HTTP_PORT=8010 embedserve serve store
    embedserve serve --config serve.toml            # http_port = 8010

The store itself is an argument, `EMBEDSERVE_STORE` or the key `store`: a folder, or a URL such as
`s3://bucket/store`. A setting that may be repeated is a list in the file, and several words in
its variable.
"""

MEMORY_HEAD = """## Memory

What clients can make a process use beside the tables and what it takes when idle, with the
defaults of its limits (`server/embedserve/processes/memory_bounds.py` has the sum for others;
`tests/hostile/test_memory.py` holds a server to it):
"""

METRICS_HEAD = """# Metrics

`GET /metrics` on the HTTP port returns the metrics in Prometheus' text format. With several workers
any worker answers for all. Counters and histograms are sums over all workers, including those that
ended. Gauges of queues and of resources are sums over the workers that are ready. The counts of
other workers are at most half a second old. [monitoring.md](monitoring.md#what-to-watch) lists the
metrics to watch.

A counter's name ends in `_total`; a histogram `NAME` is exposed as `NAME_bucket` with the label
`le`, `NAME_sum` and `NAME_count`.
"""


def settings_page() -> str:
    parts = [_made_by("server/embedserve/config.py"), SETTINGS_HEAD]
    for title, settings in (("Server", ServeSettings), ("Limits", Limits)):
        described = [one for one in fields(settings) if "help" in one.metadata]
        parts.append(f"## {title}\n\n{_summary(settings) if settings is Limits else ''}")
        parts.append(_table(SETTING_COLUMNS, map(_setting_row, described)))
    parts.append(MEMORY_HEAD)
    rows = [(human_bytes(size), what) for what, size in memory_parts(DEFAULT_LIMITS).items()]
    total = human_bytes(memory_bytes_max(DEFAULT_LIMITS))
    rows.append((f"**{total}**", "in all, for one model"))
    over_tls = human_bytes(memory_bytes_max(DEFAULT_LIMITS, has_tls=True))
    each = human_bytes(CONNECTION_TLS_BYTES)
    rows.append((f"**{over_tls}**", f"in all, where connections are over TLS: {each} more each"))
    parts.append(_table(("at most", ""), rows))
    return _joined(parts)


SETTING_COLUMNS = ("flag", "variable", "key", "default", "")


def _setting_row(one: Field[Any]) -> Sequence[str]:
    dashed = one.name.replace("_", "-")
    is_switch = isinstance(one.default, bool)
    flag = f"`--{dashed}`, `--no-{dashed}`" if is_switch else f"`--{dashed}`"
    sentence = one.metadata["help"] + _bounds(one.metadata)
    return flag, f"`EMBEDSERVE_{one.name.upper()}`", f"`{one.name}`", _default(one), sentence


def _bounds(metadata: Mapping[str, Any]) -> str:
    least, most = metadata.get("min"), metadata.get("max")
    if least is None or most is None:
        return ""
    return f" {least} to {most}."


def _default(one: Field[Any]) -> str:
    """Returns the default as written in a TOML file; "" if the sentence states it."""
    value = one.default
    if value in ("", ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and "bytes" in one.name:
        return f"`{value}` ({human_bytes(value)})"
    return f"`{value}`"


def metrics_page() -> str:
    """Returns the page of metrics of a server with one worker, which includes the garbage
    collector's."""
    ours = [family for family in FAMILIES if family.name.startswith("embedserve_")]
    of_process = [family for family in FAMILIES if family not in ours]
    python = CollectorRegistry()
    PlatformCollector(registry=python)
    GCCollector(registry=python)
    parts = [_made_by("server/embedserve/metrics/families.py"), METRICS_HEAD]
    parts.append("## Of embedserve\n")
    parts.append(_table(METRIC_COLUMNS, map(_metric_row, ours)))
    parts.append(f"## Values of labels, and buckets\n\n{_label_values()}")
    parts.append("## Of the processes\n")
    parts.append(
        "`python_gc_…` are left out with several workers: each worker has its own, and a worker "
        "cannot read those of another.\n"
    )
    rows = [*map(_python_row, python.collect()), *map(_metric_row, of_process)]
    parts.append(_table(METRIC_COLUMNS, rows))
    return _joined(parts)


METRIC_COLUMNS = ("metric", "type", "labels", "unit", "")


def _metric_row(family: Family) -> Sequence[str]:
    kind = family.kind(family.name, family.help).type
    return _row(family.name, kind, family.labels, family.unit, family.help)


def _python_row(family: Metric) -> Sequence[str]:
    # No public attribute gives the labels of a family without samples.
    labels: Sequence[str] = family._labelnames  # type: ignore[attr-defined]
    sentence = family.documentation.rstrip(".") + "."
    return _row(family.name, family.type, labels, "", sentence)


def _row(name: str, kind: str, labels: Sequence[str], unit: str, text: str) -> Sequence[str]:
    suffix = "_total" if kind == "counter" else ""
    return f"`{name}{suffix}`", kind, _named(labels), unit, text


def _label_values() -> str:
    seconds = f"{SECONDS_BUCKETS[0]:g} to {SECONDS_BUCKETS[-1]:g}"
    shorter = [bound for bound in LOOKUP_SECONDS_BUCKETS if bound < SECONDS_BUCKETS[0]]
    before = ", ".join(f"{bound * 1e6:.0f}" for bound in shorter)
    return (
        f"- `protocol`: {_named(PROTOCOLS)}.\n"
        f"- `outcome`: {_named(OUTCOMES)}; of a handshake {_named(HANDSHAKE_OUTCOMES)}.\n"
        f"- `caller`: a name in the token file, for up to {CALLERS_MAX} callers; `{UNKNOWN}` for "
        f"unauthenticated callers, `{OTHERS}` for all others.\n"
        "- `model`, `feature`: names as published. `rank`: from 0.\n"
        f"- Histograms of seconds have buckets from {seconds}, six per decade; "
        f"`embedserve_lookup_seconds` has {before} microseconds before these.\n"
        f"- Histograms of examples and of ids have powers of two, {COUNT_BUCKETS[0]:g} to "
        f"{COUNT_BUCKETS[-1]:.0f}.\n"
    )


RULE_HEAD = """# Made by docs/generate.py (make docs) out of deploy/monitoring/rules.yaml.
# Gives the Prometheus Operator the recorded series and the alerts.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: embedserve
  labels:
    app.kubernetes.io/name: embedserve
spec:
"""


def prometheus_rule() -> str:
    _, _, groups = RULES.read_text("utf-8").partition("\ngroups:\n")
    return RULE_HEAD + textwrap.indent("groups:\n" + groups, "  ")


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _summary(described: type) -> str:
    return (described.__doc__ or "").strip() + "\n"


def _made_by(source: str) -> str:
    return MADE_BY.format(source=source) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line).replace("  ", " ") + " |\n" for line in lines)


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


MADE: Mapping[str, Callable[[], str]] = {
    "docs/settings.md": settings_page,
    "docs/metrics.md": metrics_page,
    "deploy/kubernetes/base/prometheus-rule.yaml": prometheus_rule,
}
"""Functions that generate the files, by file name."""


def main() -> None:
    for name, make in MADE.items():
        (ROOT / name).write_text(make(), "utf-8")


if __name__ == "__main__":
    main()
