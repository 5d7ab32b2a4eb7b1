"""Generates docs/settings.md, docs/metrics.md and docs/cli.md from the code; run by `make docs`.

A setting is described by its field in config.py, a metric by its row in
metrics/families.py, a command by its help texts. Corrections of these pages belong there. It also
converts Prometheus' rules to the Kubernetes resource with the same rules, and copies the base's
Deployment into the package for `embedserve plan --kubernetes`. A test compares the committed files
with the generated ones.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, Metric, PlatformCollector
from typer.main import get_group

from embedserve.access.authenticator import UNKNOWN
from embedserve.commands.cli import app
from embedserve.config import DEFAULT_LIMITS, Limits, ServeSettings
from embedserve.deltas.status import BUCKETS_S
from embedserve.metrics.caller_metrics import CALLERS_MAX, OTHERS
from embedserve.metrics.families import FAMILIES, Family
from embedserve.metrics.histogram import COUNT_BUCKETS, LOOKUP_SECONDS_BUCKETS, SECONDS_BUCKETS
from embedserve.metrics.metrics import PROTOCOLS
from embedserve.metrics.request_metrics import OUTCOMES
from embedserve.metrics.shadow_metrics import BATCH_OUTCOMES
from embedserve.metrics.shard_metrics import SHARD_OUTCOMES
from embedserve.metrics.tls import HANDSHAKE_OUTCOMES
from embedserve.processes.memory_bounds import (
    CONNECTION_TLS_BYTES,
    FEATURES,
    memory_by_purpose,
    memory_bytes_max,
)
from embedserve_store.terminal.sizes import human_bytes

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy" / "monitoring" / "rules.yaml"
DEPLOYMENT = ROOT / "deploy" / "kubernetes" / "base" / "deployment.yaml"
MADE_BY = "<!-- Made by docs/generate.py (make docs) out of {source}: change that instead. -->"

SETTINGS_HEAD = """# Settings of `embedserve serve`

This page lists every setting of a server, for operators. Each is a flag, an environment variable,
or a key of the TOML file that `--config FILE` (`EMBEDSERVE_CONFIG`) names. A flag takes precedence
over a variable, and a variable over the file. An unknown key, or a value that is out of bounds,
stops the start with one line that names it.

    embedserve serve store --http-port 8010
    EMBEDSERVE_HTTP_PORT=8010 embedserve serve store
    embedserve serve --config serve.toml            # http_port = 8010

The store is an argument, `EMBEDSERVE_STORE` or the key `store`: a folder, or a URL such as
`s3://bucket/store`. A repeatable setting is a list in the file, and words separated by spaces in
its variable.
"""

MEMORY_HEAD = """## Memory

This table adds up the limits on the memory that clients can make a process use, in addition to its
tables and its idle memory. It is for the default limits and one model of {features} features.
`memory_bytes_max` in `server/embedserve/processes/memory_bounds.py` computes other sums, and
`tests/hostile/test_memory.py` verifies them.

Not included are [what has no bound yet](threat-model.md#what-is-not-bounded-yet), the connections
of a management port (up to 256 of them, with 64 MiB), and the batch that a
[shadow](rollout.md#a-version-in-the-shadow) compares. While one version replaces another, the
previous one has a queue and batches of its own until it has drained. `embedserve plan --kubernetes`
adds them for a server that follows.
"""

METRICS_HEAD = """# Metrics

This page lists every metric of a server, for operators.
[monitoring.md](monitoring.md#what-to-watch) explains which to watch.

`GET /metrics` on the HTTP port returns them in Prometheus' text format. With several workers each
worker returns the metrics of all. Counters and histograms are sums over all workers, including
those that have ended. Gauges of waiting requests and of resources are sums over the workers that
are ready. Counts of another worker are at most half a second old. While workers switch a model to
another version, one after the other, the counts of its versions are absent.

A counter's name ends in `_total`; a histogram `NAME` is exposed as `NAME_bucket` with the label
`le`, `NAME_sum` and `NAME_count`.
"""


def settings_page() -> str:
    parts = [_made_by("server/embedserve/config.py"), SETTINGS_HEAD]
    for title, settings in (("Server", ServeSettings), ("Limits", Limits)):
        described = [one for one in fields(settings) if "help" in one.metadata]
        parts.append(f"## {title}\n\n{_summary(settings) if settings is Limits else ''}")
        parts.append(_table(SETTING_COLUMNS, map(_setting_row, described)))
    parts.append(MEMORY_HEAD.format(features=FEATURES))
    rows = [(human_bytes(size), what) for what, size in memory_by_purpose(DEFAULT_LIMITS).items()]
    total = human_bytes(memory_bytes_max(DEFAULT_LIMITS))
    rows.append((f"**{total}**", "in total, for one model"))
    over_tls = human_bytes(memory_bytes_max(DEFAULT_LIMITS, has_tls=True))
    each = human_bytes(CONNECTION_TLS_BYTES)
    rows.append(
        (f"**{over_tls}**", f"in total over TLS, which takes {each} more for each connection")
    )
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
    parts.append("## Metrics of embedserve\n")
    parts.append(_table(METRIC_COLUMNS, map(_metric_row, ours)))
    parts.append(f"## Values of labels, and buckets\n\n{_label_values()}")
    parts.append("## Metrics of the processes\n")
    parts.append(
        "With several workers there are no `python_gc_…` metrics, because each worker can only "
        "report its own.\n"
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
        f"- `outcome`: {_named(OUTCOMES)}; for TLS handshakes {_named(HANDSHAKE_OUTCOMES)}; for "
        f"calls to a part {_named(SHARD_OUTCOMES)}; for batches of a shadow "
        f"{_named(BATCH_OUTCOMES)}.\n"
        "- `part`: a part of a router's tables, from 0. `direction`: `sent`, `received`.\n"
        f"- `caller`: a name in the token file, for up to {CALLERS_MAX} callers; `{UNKNOWN}` for "
        f"unauthenticated callers, `{OTHERS}` for all others.\n"
        "- `model`, `feature`: names as published. `rank`: from 0.\n"
        f"- Histograms of seconds have buckets from {seconds}, six per decade; "
        f"`embedserve_lookup_seconds` has {before} microseconds before these. Those of deltas have "
        f"{', '.join(f'{bound:g}' for bound in BUCKETS_S)}.\n"
        f"- Histograms of examples and of ids have powers of two, {COUNT_BUCKETS[0]:g} to "
        f"{COUNT_BUCKETS[-1]:.0f}.\n"
    )


CLI_HEAD = """# Commands

This page lists every command of `embedserve` with its arguments, options and an example, for
those who run or script them. `embedserve COMMAND --help` shows the same. `embedserve --version`
prints the versions of embedserve, Python, PyTorch, TorchRec and FBGEMM.

A command that fails prints one line to stderr and exits with status 1. Status 2 is a command line
that cannot be parsed, such as one with an unknown option. Status 3 is a store that does not respond
or denies access: nothing is known to be wrong in it, and a later attempt may succeed. Commands that
compute need PyTorch ([install.md](install.md)).
"""

COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Publish": {
        "describe": "embedserve describe CHECKPOINT --expected expected.safetensors "
        "--output tables.yaml",
        "plan": "embedserve plan tables.yaml --world-size 4 --sharding auto --device-memory 24GB",
        "publish": "embedserve publish CHECKPOINT tables.yaml store --model dlrm "
        "--expected expected.safetensors",
        "demo": "embedserve demo store --if-missing",
    },
    "Serve": {
        "serve": "embedserve serve store --model dlrm@stable --follow alias --workers 4",
        "cluster": "embedserve cluster store --model dlrm --replicas 2",
        "health": "embedserve health --ready",
        "admin": "embedserve admin http://127.0.0.1:8002 load dlrm@7",
        "shadow": "embedserve shadow http://127.0.0.1:8000",
        "token": "embedserve token ranker --models dlrm --expires 90d >> tokens",
    },
    "Versions in a store": {
        "inspect": "embedserve inspect store dlrm 7",
        "verify": "embedserve verify store dlrm 7",
        "diff": "embedserve diff store dlrm 6 7",
        "alias": 'embedserve alias store dlrm stable 7 --why "recall is up by 0.3 %"',
        "rollback": 'embedserve rollback store dlrm --why "CTR fell"',
        "note": 'embedserve note store dlrm 7 "trained without last week\'s clicks"',
        "history": "embedserve history store dlrm --last 20",
        "copy": "embedserve copy store s3://bucket/store dlrm@stable",
        "prune": "embedserve prune store dlrm --keep 5 --dry-run",
        "delete": "embedserve delete store dlrm 3",
    },
    "Deltas": {
        "deltas list": "embedserve deltas store dlrm",
        "deltas verify": "embedserve deltas verify store dlrm",
        "deltas undo": (
            'embedserve deltas undo store dlrm --version stable --to 1230 --why "CTR fell"'
        ),
        "deltas compact": "embedserve deltas compact store dlrm --seq 1200",
        "deltas prune": "embedserve deltas prune store dlrm --dry-run",
    },
}
"""An example of each command, by the headings of the page."""


def cli_page() -> str:
    """Returns the page of commands.

    Raises:
        ValueError: a command has no example, or an example has no command.
    """
    commands = dict(_commands(get_group(app)))
    listed = {name for examples in COMMANDS.values() for name in examples}
    if listed != set(commands):
        raise ValueError(f"COMMANDS and the commands differ: {listed ^ set(commands)}")
    parts = [_made_by("the commands, server/embedserve/commands/"), CLI_HEAD]
    for title, examples in COMMANDS.items():
        parts.append(f"## {title}\n")
        for name, example in examples.items():
            parts += _command(name, commands[name], example)
    return _joined(parts)


def _commands(group: Any) -> Iterator[tuple[str, Any]]:
    """Yields the commands of a group and of the groups in it, by their words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in _commands(command))
        else:
            yield name, command


def _command(name: str, command: Any, example: str) -> Iterator[str]:
    yield f"### embedserve {name}\n"
    yield inspect.cleandoc(command.help) + "\n"
    yield f"    {example}\n"
    rows = [_argument(one) for one in command.params if one.param_type_name == "argument"]
    if rows:
        yield _table(("argument", "meaning"), rows)
    if name == "serve":
        yield (
            "Options: `--config FILE` reads settings from a TOML file; every setting of "
            "[settings.md](settings.md) is an option.\n"
        )
        return
    rows = [_option(one) for one in command.params if one.param_type_name == "option"]
    if rows:
        yield _table(("option", "default", "meaning"), rows)


def _argument(one: Any) -> Sequence[str]:
    name = one.name.upper() + (" …" if one.nargs < 0 else "")
    return f"`{name}`" if one.required else f"`[{name}]`", _cell(one.help)


def _option(one: Any) -> Sequence[str]:
    """Returns the cells of an option. Defaults that its help text explains are left out."""
    value = "" if one.is_flag else f" {one.name.upper()}"
    default = "required" if one.required else ""
    if one.default not in (None, "", False) and not one.required:
        default = f"`{one.default:g}`" if isinstance(one.default, float) else f"`{one.default}`"
    variable = f" Variable: `{one.envvar}`." if one.envvar else ""
    flags = ", ".join(f"`{flag}{value}`" for flag in one.opts)
    return flags, default, _cell(one.help) + variable


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


RULE_HEAD = """# Made by docs/generate.py (make docs) out of deploy/monitoring/rules.yaml.
# Gives the Prometheus Operator the recorded series and the alerts.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: embedserve
  labels:
    app.kubernetes.io/name: embedserve
  annotations:
    config.kubernetes.io/local-config: "true"
spec:
"""


def prometheus_rule() -> str:
    _, _, groups = RULES.read_text("utf-8").partition("\ngroups:\n")
    return RULE_HEAD + textwrap.indent("groups:\n" + groups, "  ")


def packaged_deployment() -> str:
    made_by = (
        "# Made by docs/generate.py (make docs) out of deploy/kubernetes/base/deployment.yaml.\n"
    )
    return made_by + DEPLOYMENT.read_text("utf-8")


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
    "docs/cli.md": cli_page,
    "deploy/kubernetes/base/prometheus-rule.yaml": prometheus_rule,
    "server/embedserve/commands/planning/base_deployment.yaml": packaged_deployment,
}
"""Functions that generate the files, by file name."""


def main() -> None:
    for name, make in MADE.items():
        (ROOT / name).write_text(make(), "utf-8")


if __name__ == "__main__":
    main()
