"""Startup output: warnings about settings that are likely a mistake; then, when the server is
ready, the models, the addresses and an example command."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections import Counter
from dataclasses import fields
from difflib import get_close_matches

from embedserve.config import Limits, ServeSettings, bracketed, is_loopback
from embedserve.model_info import ModelInfo
from embedserve.model_names import split_name
from embedserve.processes.startup.ports import Ports
from embedserve_store.terminal.console import say

logger = logging.getLogger(__name__)

PREFIX = "EMBEDSERVE_"
VARIABLES = (
    *(one.name.upper() for one in (*fields(ServeSettings), *fields(Limits))),
    *("BY", "CONFIG", "DELTA_SIGNING_KEY", "TOKEN"),
)
"""Names of variables that this version reads, without their prefix."""
ALIKE = 0.85
"""Similarity ratio (difflib) from which a name may be a typo. Kubernetes' own variables for a
Service embedserve, such as EMBEDSERVE_PORT, are below it."""


def log_ready(
    models: list[ModelInfo],
    ports: Ports,
    seconds: float,
    settings: ServeSettings,
) -> None:
    """Prints the served models, the addresses, and an example command unless it is a shard."""
    for model in models:
        tag = f" ({model.tag})" if model.tag not in ("", str(model.version)) else ""
        title = f"{model.name} version {model.version}{tag}"
        if model.plan.hosts is not None and settings.shards:
            local = f", {', '.join(model.local_tables)} also here" if model.local_tables else ""
            parts = model.plan.hosts.parts
            say(f"{title}: {len(model.tables)} tables in the shards of {parts} parts{local}")
            continue
        kinds = Counter(model.plan.tables[table.name].sharding_type for table in model.tables)
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        ranks = len(model.bytes_per_rank)
        copies = f"{model.replicas} replicas of " if model.replicas > 1 else ""
        tables = "1 table" if len(model.tables) == 1 else f"{len(model.tables)} tables"
        part = "" if model.part is None else f"part {model.part}, "
        say(
            f"{title}: {part}{copies}{tables} over {ranks} {model.device_type} "
            f"rank{'s' if ranks > 1 else ''} ({shown}), lookups {model.lookup_kind}"
        )
    host = "localhost" if ports.host in ("0.0.0.0", "::") else bracketed(ports.host)
    base = f"{'https' if settings.tls_cert else 'http'}://{host}:{ports.http}"
    count = f"{settings.workers} workers, " if settings.workers > 1 else ""
    pages = base
    page = "console" if settings.tokens else "docs"  # the console asks for a token
    if ports.management >= 0:
        behind = settings.management_host
        scheme = "https" if settings.tls_cert and not is_loopback(behind) else "http"
        pages = f"{scheme}://{bracketed(behind)}:{ports.management}"
    say(
        f"ready after {seconds:.1f} s: {count}REST {base}{_and_unix(settings.http_uds)} "
        f"({page} at {pages}/{page}), gRPC {host}:{ports.grpc}{_and_unix(settings.grpc_uds)}"
    )
    if settings.part:  # only routers call a shard
        return
    say("try:")
    print(f"  {curl_line(base, models[0], curl_options(settings))}", flush=True)


def _and_unix(path: str) -> str:
    return f" and unix:{path}" if path else ""


def curl_options(settings: ServeSettings) -> str:
    """Returns the options that curl needs. The client's own certificate is a placeholder."""
    options = "-s"
    if settings.tls_cert:
        options += f" --cacert {shlex.quote(settings.tls_cert)}"
    if settings.tls_client_ca:
        options += " --cert CLIENT.pem"
    if settings.tokens:
        options += ' -H "Authorization: Bearer $TOKEN"'
    return options


def curl_line(base: str, model: ModelInfo, options: str) -> str:
    """Returns a curl command that works as pasted."""
    body = json.dumps({"features": model.example}, separators=(",", ":"))
    return f"curl {options} {base}/models/{model.name}/embed -d {shlex.quote(body)}"


def warn_about_settings(settings: ServeSettings) -> None:
    """Logs a warning for each setting that is valid but likely a mistake."""
    if reached := _reached_from_elsewhere(settings):
        has_tls, asks_who = bool(settings.tls_cert), bool(settings.tokens or settings.tls_client_ca)
        if not (has_tls or asks_who):
            logger.warning(
                "%s, without tokens and without TLS: anyone who reaches it may send requests, and "
                "can read those of others (--tokens, --tls-cert)",
                reached,
            )
        elif not asks_who:
            logger.warning(
                "%s, without tokens: anyone who reaches it may send requests (--tokens)",
                reached,
            )
        elif not has_tls:
            logger.warning(
                "%s, with tokens and without TLS: tokens can be read on their way (--tls-cert, or "
                "a proxy in front that has TLS, on this host)",
                reached,
            )
    for own in sorted(one.removeprefix(PREFIX) for one in os.environ if one.startswith(PREFIX)):
        if own not in VARIABLES and (alike := get_close_matches(own, VARIABLES, 1, ALIKE)):
            logger.warning("%s%s has no effect: did you mean %s%s?", PREFIX, own, PREFIX, alike[0])
    tags = [split_name(name)[1] for name in settings.model]
    if settings.follow == "alias" and all(not tag or tag.isdigit() for tag in tags):
        logger.warning(
            "follow is 'alias', but no model is named NAME@ALIAS: nothing is followed (--model)"
        )


def _reached_from_elsewhere(settings: ServeSettings) -> str:
    """Returns the setting that lets other hosts reach the server; "" if none does."""
    if not is_loopback(settings.host):
        return f"host is {settings.host!r}"
    if settings.management_port >= 0 and not is_loopback(settings.management_host):
        return f"management_host is {settings.management_host!r}"
    return ""
