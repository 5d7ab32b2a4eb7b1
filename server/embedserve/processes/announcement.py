"""What is told when a server is ready: what it serves, where, and a command that asks it."""

from __future__ import annotations

import json
import shlex

from embedserve.config import ServeSettings, is_loopback
from embedserve.processes.ports import Ports, SharedPorts, bracketed
from embedserve.terminal.console import say
from embedserve.types import ModelInfo


def say_ready_to_serve(
    models: list[ModelInfo],
    ports: Ports | SharedPorts,
    seconds: float,
    settings: ServeSettings,
) -> None:
    """Tells what is served, where, and how to ask it."""
    for model in models:
        plans = ((table.name, model.plan.tables[table.name]) for table in model.tables)
        shown = ", ".join(f"{name} {plan.sharding_type}" for name, plan in plans)
        ranks = len(model.bytes_per_rank)
        copies = f"{model.replicas} replicas of " if model.replicas > 1 else ""
        tag = f" ({model.tag})" if model.tag not in ("", str(model.version)) else ""
        say(
            f"{model.name} version {model.version}{tag}: {copies}{len(model.tables)} tables "
            f"over {ranks} {model.device_type} rank{'s' if ranks > 1 else ''} ({shown}), "
            f"lookups {model.lookup_kind}"
        )
    host = "localhost" if ports.host in ("0.0.0.0", "::") else bracketed(ports.host)
    base = f"{'https' if settings.tls_cert else 'http'}://{host}:{ports.http}"
    count = f"{settings.workers} workers, " if settings.workers > 1 else ""
    pages = base
    if ports.management >= 0:
        behind = settings.management_host
        scheme = "https" if settings.tls_cert and not is_loopback(behind) else "http"
        pages = f"{scheme}://{bracketed(behind)}:{ports.management}"
    say(
        f"ready after {seconds:.1f} s: {count}REST {base}{_and_unix(settings.http_uds)} "
        f"(docs at {pages}/docs), gRPC {host}:{ports.grpc}{_and_unix(settings.grpc_uds)}"
    )
    say("try:")
    print(f"  {curl_line(base, models[0], curl_options(settings))}", flush=True)


def _and_unix(path: str) -> str:
    return f" and unix:{path}" if path else ""


def curl_options(settings: ServeSettings) -> str:
    """What curl needs to be told; the client's own certificate stands for itself."""
    options = "-s"
    if settings.tls_cert:
        options += f" --cacert {shlex.quote(settings.tls_cert)}"
    if settings.tls_client_ca:
        options += " --cert CLIENT.pem"
    if settings.tokens:
        options += ' -H "Authorization: Bearer $TOKEN"'
    return options


def curl_line(base: str, model: ModelInfo, options: str) -> str:
    """A command that works as pasted."""
    body = json.dumps({"features": model.example}, separators=(",", ":"))
    return f"curl {options} {base}/models/{model.name}/embed -d {shlex.quote(body)}"
