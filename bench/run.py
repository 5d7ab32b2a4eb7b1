"""The benchmark: every server in turn, the same requests; a table, a picture, JSON, and the bars.

    python bench/run.py [--workloads small rank bulk] [--ids uniform zipf] [--servers NAME …]
                        [--operations pauses workers memory tables overload]
                        [--rounds 3] [--seconds 2] [--quick] [--install]

Figures of one run are compared with each other only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bars
import kernel
import load
import operations
import overload
import report
from measure import Row, measure
from servers.base import Server
from servers.constants import ConstantGrpc, ConstantHttp
from servers.embedserve import EmbedServe, EmbedServeBatch
from servers.peers import peers
from workloads import workload

RESULTS = Path(__file__).parent / "results"
OPERATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "pauses": operations.pauses,
    "workers": operations.workers,
    "memory": operations.memory,
    "tables": operations.tables,
    "overload": overload.measure,
}


def all_servers() -> list[Server]:
    return [
        ConstantHttp("JSON"),
        ConstantHttp("protobuf"),
        ConstantGrpc("4"),
        ConstantGrpc("8"),
        ConstantGrpc("uvloop"),
        EmbedServe(),
        EmbedServeBatch(),
        *peers(),
    ]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="*", default=["small", "rank", "bulk"])
    parser.add_argument("--operations", nargs="*", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--ids", nargs="+", default=["uniform", "zipf"])
    parser.add_argument("--servers", nargs="+", help="only those whose names begin so")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round of a second; no operations")
    parser.add_argument("--install", action="store_true", help="install the peers and end")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = options()
    servers = [one for one in all_servers() if _is_chosen(one, chosen.servers)]
    if chosen.install:
        for server in servers:
            print(f"installing {server.name} …", file=sys.stderr)
            server.install()
        return
    load.need("wrk", "h2load")
    if (os.cpu_count() or 1) < 2:
        sys.exit("two cores are needed: one serves, one loads")
    rounds, seconds = (1, 1) if chosen.quick else (chosen.rounds, chosen.seconds)
    results: dict[str, list[Row]] = {}
    references: dict[str, dict[str, float]] = {}
    for name in chosen.workloads:
        for ids in chosen.ids:
            work = workload(name, ids)
            work.tables.make()
            able = [one for one in servers if _is_able(one, name, ids)]
            label = f"{name} {ids}"
            references[label] = kernel.measure(work)
            results[label] = measure(able, work, rounds, seconds)
            _written(chosen.output, results, references, {})
    found: dict[str, dict[str, Any]] = {}
    for name in [] if chosen.quick else chosen.operations:
        print(name, file=sys.stderr)
        try:
            found[name] = OPERATIONS[name]()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    print(_written(chosen.output, results, references, found))
    print(f"written to {chosen.output}", file=sys.stderr)


def _written(
    folder: Path,
    results: dict[str, list[Row]],
    references: dict[str, dict[str, float]],
    found: dict[str, dict[str, Any]],
) -> str:
    """Writes what there is so far, and gives its tables."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = (
        report.tables(results, references),
        report.operations(found),
        bars.said(results, references, found),
    )
    text = "\n".join(parts)
    (folder / "bench.md").write_text(text)
    figures = report.as_json(results, references) | {"operations": found}
    (folder / "bench.json").write_text(json.dumps(figures, indent=1))
    if results:
        report.picture(results, folder / "bench.png")
    return text


def _is_chosen(server: Server, names: list[str] | None) -> bool:
    return names is None or any(server.name.startswith(name) for name in names)


def _is_able(server: Server, workload_name: str, ids: str) -> bool:
    if workload_name not in server.workloads or ids not in server.ids:
        return False
    if missing := server.missing():
        print(f"{server.name} is left out: {missing}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
