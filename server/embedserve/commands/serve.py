"""`embedserve serve`: loads the models of a store and serves them until told to stop."""

from __future__ import annotations

import json
import logging
import shlex
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from embedserve.commands.console import console, hush_torch, say, table_progress
from embedserve.config import ServeSettings
from embedserve.ports import Ports, bracketed, claim_ports
from embedserve.types import ModelInfo
from embedserve_store import ModelStore, ModelVersion, StoreError, verify

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
    with console.status("importing PyTorch and TorchRec …"):
        from embedserve.engine.restore import restore
    engines = {}
    for name, version in versions.items():
        with console.status(f"restoring {name} version {version.manifest.version} …"):
            engines[name] = restore(version, settings.devices, strict_plan=settings.strict_plan)
    with ThreadPoolExecutor(1, thread_name_prefix="lookup") as executor:
        service = server.build_service(engines, settings, executor)

        def say_ready() -> None:
            _say_ready(service.models(), versions, ports, time.perf_counter() - start)

        uvloop.run(server.run(service, settings, ports, say_ready))


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
    store = ModelStore(settings.store)
    published = store.models()
    for name in settings.model:
        if name not in published:
            raise StoreError(
                f"{settings.store}: no model {name!r}, there are {', '.join(published) or 'none'}"
            )
    names = list(settings.model) or published
    if not names:
        raise StoreError(f"{settings.store}: no model in this store; publish one first")
    if settings.default_model and settings.default_model not in names:
        raise ValueError(
            f"default_model is {settings.default_model!r}, but what is served is {', '.join(names)}"
        )
    return {name: store.load(name) for name in names}


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
    ends = bags.lengths.reshape(-1).cumsum().reshape(bags.lengths.shape)
    fullest = sorted(
        range(bags.lengths.shape[1]),
        key=lambda example: -int(np.count_nonzero(bags.lengths[:, example])),
    )
    features = {
        feature: [
            bags.ids[ends[f, i] - bags.lengths[f, i] : ends[f, i]][:CURL_IDS_MAX].tolist()
            for i in fullest[:CURL_EXAMPLES]
        ]
        for f, feature in enumerate(model.features)
    }
    body = json.dumps({"features": features}, separators=(",", ":"))
    return f"curl -s {base}/models/{model.name}/embed -d {shlex.quote(body)}"
