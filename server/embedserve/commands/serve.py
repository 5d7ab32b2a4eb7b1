"""`embedserve serve`: loads the models of a store and serves them until told to stop."""

from __future__ import annotations

import json
import logging
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embedserve.commands.console import console, hush_torch, say, table_progress
from embedserve.commands.stores import opened
from embedserve.config import ServeSettings
from embedserve.ports import Ports, bracketed, claim_ports
from embedserve.types import ModelInfo
from embedserve_store import Bags, IdRule, ModelVersion, StoreError, verify
from embedserve_store.staging import VERSION_PATTERN

if TYPE_CHECKING:
    from embedserve.engine.engine import Engine

LOG_LEVELS = ("debug", "info", "warning", "error")
CURL_EXAMPLES = 2
CURL_IDS_MAX = 6


def serve(settings: ServeSettings) -> None:
    """Runs the server in this process until SIGTERM or SIGINT.

    Raises:
        StoreError: nothing to serve, or a version that cannot be served.
        OSError: a port cannot be bound.
        ValueError: a setting makes no sense.
    """
    start = time.perf_counter()
    _set_up_logging(settings.log_level)
    versions = _open_versions(settings)
    ports = claim_ports(settings.host, settings.http_port, settings.grpc_port)
    try:
        _serve(settings, versions, ports, start)
    finally:
        ports.close()


def _serve(
    settings: ServeSettings, versions: dict[str, ModelVersion], ports: Ports, start: float
) -> None:
    import uvloop

    from embedserve import server

    if settings.verify:
        _verify(versions)
    engines = restore_all(settings, versions)
    with ThreadPoolExecutor(1, thread_name_prefix="lookup") as executor:
        service = server.build_service(engines, settings, executor)

        def say_ready() -> None:
            _say_ready(service.models(), versions, ports, time.perf_counter() - start)

        uvloop.run(server.run(service, settings, ports, say_ready))


def restore_all(settings: ServeSettings, versions: dict[str, ModelVersion]) -> dict[str, Engine]:
    """The warm engine of each of ``versions``, by model name."""
    with console.status("importing PyTorch and TorchRec …"):
        from embedserve.engine.restore import restore
    engines = {}
    for name, version in versions.items():
        with console.status(f"restoring {name} version {version.manifest.version} …"):
            engines[name] = restore(version, settings.devices, strict_plan=settings.strict_plan)
    return engines


def _set_up_logging(level: str) -> None:
    if level not in LOG_LEVELS:
        raise ValueError(f"log_level is {level!r}, expected one of {', '.join(LOG_LEVELS)}")
    # torchrec and FBGEMM tell at length how they were built; only what goes wrong is shown.
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for ours in ("embedserve", "embedserve_store"):
        logging.getLogger(ours).setLevel(level.upper())
    hush_torch()


def _open_versions(settings: ServeSettings) -> dict[str, ModelVersion]:
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


def _say_ready(
    models: list[ModelInfo],
    versions: dict[str, ModelVersion],
    ports: Ports,
    seconds: float,
) -> None:
    for model in models:
        shown = ", ".join(f"{table.name} {table.sharding}" for table in model.tables)
        ranks = len(model.bytes_per_rank)
        say(
            f"{model.name} version {model.version}: {len(model.tables)} tables over {ranks} "
            f"{model.device_type} rank{'s' if ranks > 1 else ''} ({shown})"
        )
    host = "localhost" if ports.host in ("0.0.0.0", "::") else bracketed(ports.host)
    base = f"http://{host}:{ports.http}"
    say(f"ready after {seconds:.1f} s: REST {base} (docs at {base}/docs), gRPC {host}:{ports.grpc}")
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
