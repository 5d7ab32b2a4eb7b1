"""The benchmark: sends the same requests to every server in turn, and writes tables and a picture.

    python bench/run.py [--workloads small rank bulk] [--ids uniform zipf] [--servers NAME …]
                        [--operations heads pauses workers memory tables overload]
                        [--against CHECKOUT] [--rounds 3] [--seconds 2] [--quick] [--install]

It also writes JSON, and checks the figures against the targets. Only figures of the same run are
comparable with each other.
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

import kernel
import load
import report
import targets
from measure import Row, measure
from operations import heads, host, overload, workers
from servers.base import Server
from servers.constants import ConstantGrpc, ConstantHttp, ConstantProtocol
from servers.embedserve import EmbedServe, EmbedServeBefore, EmbedServeGrpcio
from servers.embedserve_infer import EmbedServeInfer
from servers.json_peers import BentoMl, FastApi, LitServe, Mosec, RayServe, TypedFastApi
from servers.redis_peer import Redis
from servers.triton import Triton
from workloads import workload

RESULTS = Path(__file__).parent / "results"
OPERATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "heads": heads.measure,
    "pauses": host.pauses,
    "workers": workers.measure,
    "memory": host.memory,
    "tables": host.tables,
    "overload": overload.measure,
}


WHOLE = {
    "workloads": ["small", "rank", "bulk"],
    "operations": list(OPERATIONS),
    "ids": ["uniform", "zipf"],
    "rounds": 3,
    "seconds": 2,
}
QUICK = {
    "workloads": ["small"],
    "operations": [],
    "ids": ["uniform"],
    "rounds": 1,
    "seconds": 2,
}
QUICK_SERVERS = {
    "embedserve",
    "embedserve before",
    "embedserve, Open Inference",
    "constant reply, JSON",
    "constant reply, protobuf",
    "constant reply, bare protocol",
    "Triton",
}


def all_servers(against: Path | None) -> list[Server]:
    """Returns the servers in the order in which a round starts them. Servers that are compared most
    closely are adjacent."""
    return [
        ConstantHttp("JSON"),
        ConstantHttp("protobuf"),
        ConstantProtocol(),
        ConstantGrpc("4"),
        ConstantGrpc("8"),
        ConstantGrpc("uvloop"),
        EmbedServe(),
        *([EmbedServeBefore(against)] if against else []),
        EmbedServeInfer(),
        EmbedServeGrpcio(),
        Triton(),
        Redis(),
        Mosec(),
        FastApi(),
        TypedFastApi(),
        LitServe(),
        BentoMl(),
        RayServe(),
    ]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="*", help="default: small rank bulk")
    parser.add_argument("--operations", nargs="*", choices=OPERATIONS, help="default: all")
    parser.add_argument("--ids", nargs="+", help="default: uniform zipf")
    parser.add_argument("--servers", nargs="+", help="only those whose names begin so")
    parser.add_argument("--against", type=Path, help="another checkout, whose server is compared")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=int)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="embedserve, constant replies and Triton on `small`, one round; what else is given "
        "goes before this",
    )
    parser.add_argument("--install", action="store_true", help="install the peers and end")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    defaults = QUICK if chosen.quick else WHOLE
    for name, value in defaults.items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    return chosen


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = options()
    servers = [one for one in all_servers(chosen.against) if _is_chosen(one, chosen)]
    if chosen.install:
        for server in servers:
            print(f"installing {server.name} …", file=sys.stderr)
            server.install()
        return
    load.need("wrk", "h2load")
    if (os.cpu_count() or 1) < 2:
        sys.exit("two cores are needed: one serves, one loads")
    results: dict[str, list[Row]] = {}
    references: dict[str, dict[str, float]] = {}
    for name in chosen.workloads:
        for ids in chosen.ids:
            work = workload(name, ids)
            work.tables.make()
            able = [one for one in servers if _is_able(one, name, ids)]
            label = f"{name} {ids}"
            references[label] = kernel.measure(work)
            results[label] = measure(able, work, chosen.rounds, chosen.seconds)
            _written(chosen.output, results, references, {})
    found: dict[str, dict[str, Any]] = {}
    for name in chosen.operations:
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
    """Writes the results so far, and returns their tables."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = (
        report.tables(results, references),
        report.operations(found),
        targets.said(results, references, found),
    )
    text = "\n".join(parts)
    (folder / "bench.md").write_text(text)
    figures = report.as_json(results, references) | {"operations": found}
    (folder / "bench.json").write_text(json.dumps(figures, indent=1))
    if results:
        report.picture(results, folder / "bench.png")
    return text


def _is_chosen(server: Server, chosen: argparse.Namespace) -> bool:
    if chosen.servers is not None:
        return any(server.name.startswith(name) for name in chosen.servers)
    return not chosen.quick or server.name in QUICK_SERVERS


def _is_able(server: Server, workload_name: str, ids: str) -> bool:
    if workload_name not in server.workloads or ids not in server.ids:
        return False
    if missing := server.missing():
        print(f"{server.name} is left out: {missing}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
