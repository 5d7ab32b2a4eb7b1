"""`embedserve serve`: loads the models of a store and serves them until told to stop.

In this process, or in several that share what is done here (serve_workers.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embedserve.config import ServeSettings
from embedserve.processes.held_tables import TABLES, made_resident, refuse_on_cuda
from embedserve.processes.ports import Ports, SharedPorts, bracketed, claim_ports
from embedserve.terminal.console import console, hush_torch, say, table_progress
from embedserve.terminal.stores import opened
from embedserve.types import ModelInfo
from embedserve_store import Bags, IdRule, ModelVersion, StoreError, verify
from embedserve_store.staging import VERSION_PATTERN

if TYPE_CHECKING:
    from embedserve.engine.engine import Engine

LOG_LEVELS = ("debug", "info", "warning", "error")
CURL_EXAMPLES = 2
CURL_IDS_MAX = 6


def serve(settings: ServeSettings) -> None:
    """Runs the server until SIGTERM or SIGINT.

    Raises:
        StoreError: nothing to serve, or a version that cannot be served.
        OSError: a port cannot be bound.
        ValueError: a setting makes no sense.
    """
    start = time.perf_counter()
    set_up_logging(settings.log_level)
    if settings.tables not in TABLES:
        raise ValueError(f"tables is {settings.tables!r}, expected one of {', '.join(TABLES)}")
    refuse_on_cuda(settings, settings.devices)
    if settings.workers > 1:
        from embedserve.processes.serve_workers import serve_workers

        serve_workers(settings, start)
        return
    versions = open_versions(settings)
    ports = claim_ports(settings.host, settings.http_port, settings.grpc_port)
    try:
        _serve(settings, versions, ports, start)
    finally:
        ports.close()


def _serve(
    settings: ServeSettings, versions: dict[str, ModelVersion], ports: Ports, start: float
) -> None:
    import uvloop

    from embedserve.processes import server

    versions = prepared(settings, versions)
    engines = restore_all(settings, versions)
    threads = server.lookup_threads(settings)
    with ThreadPoolExecutor(threads, thread_name_prefix="lookup") as executor:
        service = server.build_service(engines, settings, executor)

        def say_ready() -> None:
            say_ready_to_serve(service.models(), versions, ports, time.perf_counter() - start, 1)

        uvloop.run(server.run(service, settings, ports, say_ready))


def prepared(settings: ServeSettings, versions: dict[str, ModelVersion]) -> dict[str, ModelVersion]:
    """``versions``, resident and verified where that is asked for; what is verified is what will
    be read. Ends all its threads.

    Raises:
        StoreError: there is no memory for them, or they are not as they were published.
    """
    if settings.tables == "resident":
        versions = made_resident(versions)
    if settings.verify:
        _verify(versions)
    return versions


def restore_all(
    settings: ServeSettings, versions: dict[str, ModelVersion], *, is_shown: bool = True
) -> dict[str, Engine]:
    """The warm engine of each of ``versions``, by model name; ``is_shown`` on the console.

    Raises:
        StoreError: a version cannot be served on these devices, or answers wrongly.
        ValueError: a setting does not fit these devices.
    """
    status = console.status if is_shown else contextlib.nullcontext
    with status("importing PyTorch and TorchRec …"):
        import torch

        from embedserve.engine.restore import resolve_devices, restore
    # Large batches are cut for threads of our own. torch's would spin between their turns, on
    # cores that others need.
    torch.set_num_threads(1)
    engines = {}
    for name, version in versions.items():
        refuse_on_cuda(settings, resolve_devices(settings.devices, version.plan.world_size)[0])
        with status(f"restoring {name} version {version.manifest.version} …"):
            engines[name] = restore(version, settings.devices, strict_plan=settings.strict_plan)
    return engines


def set_up_logging(level: str) -> None:
    """Of this process. Raises ValueError: there is no such level."""
    if level not in LOG_LEVELS:
        raise ValueError(f"log_level is {level!r}, expected one of {', '.join(LOG_LEVELS)}")
    # torchrec and FBGEMM tell at length how they were built; only what goes wrong is shown.
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for ours in ("embedserve", "embedserve_store"):
        logging.getLogger(ours).setLevel(level.upper())
    hush_torch()


def open_versions(settings: ServeSettings) -> dict[str, ModelVersion]:
    """The versions to serve, by model name, pulled first where the store is remote.

    Raises:
        StoreError: there is none, or one cannot be read.
        ValueError: a setting makes no sense.
    """
    wanted = dict(map(_name_and_version, settings.model))
    if len(wanted) < len(settings.model):
        raise ValueError(f"model is {', '.join(settings.model)}: one is named twice")
    with opened(settings.store, Path(settings.cache) if settings.cache else None) as store:
        # A model of which a version is named is served from the cache even where a remote store
        # cannot be reached, so what the store has is asked for only where it matters.
        if not wanted or None in wanted.values():
            _check_published(store.models(), wanted, settings)
            wanted = wanted or dict.fromkeys(store.models())
        if settings.default_model and settings.default_model not in wanted:
            raise ValueError(
                f"default_model is {settings.default_model!r}, but what is served is "
                f"{', '.join(wanted)}"
            )
        return {name: store.load(name, version) for name, version in wanted.items()}


def _name_and_version(text: str) -> tuple[str, int | None]:
    """Of NAME or NAME@VERSION."""
    name, at, version = text.partition("@")
    if not at:
        return name, None
    if not VERSION_PATTERN.fullmatch(version):
        raise ValueError(f"model is {text!r}: expected NAME or NAME@VERSION, such as dlrm@3")
    return name, int(version)


def _check_published(
    published: list[str], wanted: dict[str, int | None], settings: ServeSettings
) -> None:
    for name in wanted:
        if name not in published:
            raise StoreError(
                f"{settings.store}: no model {name!r}, there are {', '.join(published) or 'none'}"
            )
    if not published:
        raise StoreError(f"{settings.store}: no model in this store; publish one first")


def _verify(versions: dict[str, ModelVersion]) -> None:
    for name, version in versions.items():
        say(f"verifying {name} version {version.manifest.version}")
        with table_progress() as progress:
            verify(version, progress)


def say_ready_to_serve(
    models: list[ModelInfo],
    versions: dict[str, ModelVersion],
    ports: Ports | SharedPorts,
    seconds: float,
    workers: int,
) -> None:
    """Tells what is served, where, and how to ask it."""
    for model in models:
        shown = ", ".join(f"{table.name} {table.sharding}" for table in model.tables)
        ranks = len(model.bytes_per_rank)
        say(
            f"{model.name} version {model.version}: {len(model.tables)} tables over {ranks} "
            f"{model.device_type} rank{'s' if ranks > 1 else ''} ({shown})"
        )
    host = "localhost" if ports.host in ("0.0.0.0", "::") else bracketed(ports.host)
    base = f"http://{host}:{ports.http}"
    count = f"{workers} workers, " if workers > 1 else ""
    say(
        f"ready after {seconds:.1f} s: {count}REST {base} (docs at {base}/docs), "
        f"gRPC {host}:{ports.grpc}"
    )
    say("try:")
    model = models[0]
    print(f"  {curl_line(base, model, versions[model.name])}", flush=True)


def curl_line(base: str, model: ModelInfo, version: ModelVersion) -> str:
    """A command that works as pasted: two of the model's golden examples, shortened."""
    bags = version.goldens().bags
    fullest = sorted(
        range(bags.lengths.shape[1]),
        key=lambda example: -int(np.count_nonzero(bags.lengths[:, example])),
    )
    features = {
        feature: _sample(bags, position, fullest[:CURL_EXAMPLES], rule)
        for position, (feature, rule) in enumerate(
            zip(model.features, version.manifest.rule_per_feature, strict=True)
        )
    }
    body = json.dumps({"features": features}, separators=(",", ":"))
    return f"curl -s {base}/models/{model.name}/embed -d {shlex.quote(body)}"


def _sample(
    bags: Bags, feature: int, examples: list[int], rule: IdRule
) -> list[list[int]] | list[list[str]]:
    """A bag of ids for each of ``examples``. Goldens know strings by their hash only."""
    if rule.id_type == "string":
        return [list(rule.examples)] * len(examples)
    ends = bags.lengths.reshape(-1).cumsum().reshape(bags.lengths.shape)
    return [
        bags.ids[ends[feature, i] - bags.lengths[feature, i] : ends[feature, i]][
            :CURL_IDS_MAX
        ].tolist()
        for i in examples
    ]
