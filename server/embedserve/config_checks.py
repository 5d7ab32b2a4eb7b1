"""Checks of settings that are invalid or contradict each other."""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from urllib.parse import urlsplit

from embedserve.config import ServeSettings, is_loopback
from embedserve.on_missing import MissingPolicy
from embedserve_store.deltas.notify.broker_url import read_broker_url
from embedserve_store.errors import StoreError
from embedserve_store.parts.part import Part
from embedserve_store.remote.remote_store import is_url

UDS_PATH_BYTES_MAX = 107
"""Maximum bytes of a Unix socket's path: the kernel's 108 without the terminating null."""
HANG_S_MIN = 2.0
"""Smallest worker_hang_s in seconds, unless it is 0. Workers send a heartbeat every half second; a
shorter limit would replace workers of a busy host."""
UDS_MODE_MAX = 0o777
UDS_MODE_DIGITS_MAX = 4
OPENTELEMETRY = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
DELTA_POLL_S_MIN = 0.01
CHOICES: Mapping[str, Sequence[str]] = {
    "deltas": ("none", "follow"),
    "follow": ("none", "alias", "latest"),
    "gpu_layout": ("auto", "replicas", "shards"),
    "grpc_server": ("native", "grpcio"),
    "lookup": ("compiled", "eager"),
    "partial_dtype": ("float32", "float16"),
    "tables": ("mapped", "resident"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}
"""Values of the settings that have a few."""
ROUTER_SETTINGS = (
    *("local_bytes", "on_missing", "partial_dtype", "row_cache"),
    *("shard_ca", "shard_cert", "shard_key", "shard_token"),
)
"""Settings that only a router has; other servers have their defaults."""


def check_settings(settings: ServeSettings) -> None:
    """Raises ValueError for settings that are invalid or contradict each other on any host and with
    any store."""
    for name, choices in CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    if 0 < settings.worker_hang_s < HANG_S_MIN:
        raise ValueError(
            f"worker_hang_s is {settings.worker_hang_s:g}, which workers of a busy host would "
            f"exceed: use {HANG_S_MIN:g} or more, or 0 for never"
        )
    _check_folders(settings)
    _check_deltas(settings)
    _check_parts(settings)
    _check_security(settings)
    _check_proxies(settings)
    _check_traces(settings)
    _check_unix_sockets(settings)
    _check_shared_memory(settings)
    check_device(settings, settings.devices)


def uds_mode(settings: ServeSettings) -> int:
    """Returns the mode of the Unix socket files. Raises ValueError for an invalid mode."""
    mode = settings.uds_mode
    if not mode or len(mode) > UDS_MODE_DIGITS_MAX or mode.strip("01234567"):
        raise ValueError(f"uds_mode is {mode!r}, expected octal digits such as 600")
    if int(mode, 8) > UDS_MODE_MAX:
        raise ValueError(f"uds_mode is {mode!r}, expected {UDS_MODE_MAX:o} at most")
    return int(mode, 8)


def why_fixed(settings: ServeSettings, device_type: str) -> str:
    """Returns why the served versions cannot change while the server runs; "" if they can."""
    if device_type == "cuda":
        return (
            "the tables go to GPUs, where the next version would have to fit beside the one that "
            "is served, which is not supported yet"
        )
    if settings.is_supervised and settings.tables == "resident":
        way_out = "" if settings.deltas != "none" else ", or --workers 1"
        return (
            "a version that comes while workers run cannot be copied into memory that they share: "
            f"use --tables mapped{way_out}"
        )
    return ""


def delta_poll_s(settings: ServeSettings) -> float:
    """Returns the seconds between two polls for deltas."""
    return settings.delta_poll_s or (0.25 if is_url(settings.store) else 0.05)


def _check_folders(settings: ServeSettings) -> None:
    """Raises ValueError for paths that the processes of a server cannot send each other."""
    for name in ("store", "cache"):
        path = getattr(settings, name)
        if settings.is_supervised and path != path.encode(errors="replace").decode():
            raise ValueError(
                f"{name} is {path!r}, which is not UTF-8: with several processes (workers, deltas) "
                "give it another name"
            )


def _check_deltas(settings: ServeSettings) -> None:
    poll_s = settings.delta_poll_s
    if poll_s and not DELTA_POLL_S_MIN <= poll_s < math.inf:
        raise ValueError(
            f"delta_poll_s is {poll_s:g}, expected {DELTA_POLL_S_MIN:g} to 3600, or 0 for the "
            "default"
        )
    if settings.delta_notify and settings.deltas != "none":
        try:
            read_broker_url(settings.delta_notify)
        except StoreError as error:
            raise ValueError(str(error)) from error


def _check_parts(settings: ServeSettings) -> None:
    """Raises ValueError for settings that contradict a server of a part, or a router."""
    if settings.part:
        Part.parse(settings.part)
    if settings.part and settings.shards:
        raise ValueError(
            f"part is {settings.part!r} and shards is {settings.shards!r}: a server is a shard, "
            "which holds a part, or a router, which calls shards"
        )
    name = "part" if settings.part else "shards"
    if (settings.part or settings.shards) and settings.deltas != "none":
        raise ValueError(
            f"deltas is {settings.deltas!r}, but {name} is {getattr(settings, name)!r}: rows of a "
            "model in parts change by whole versions only"
        )
    if not settings.shards:
        for setting in ROUTER_SETTINGS:
            if (value := getattr(settings, setting)) != getattr(ServeSettings, setting):
                shown = ", ".join(value) if isinstance(value, tuple) else value
                raise ValueError(
                    f"{setting} is {shown!r}, but this server is no router: give shards"
                )
        return
    MissingPolicy.parse(settings.on_missing)
    for setting, own in (("tables", "mapped"), ("verify", False), ("lookup", "compiled")):
        if (value := getattr(settings, setting)) != own:
            raise ValueError(
                f"{setting} is {value!r}, but shards is {settings.shards!r}: the rows are in the "
                "shards"
            )
    if settings.devices not in ("auto", "cpu"):
        raise ValueError(
            f"devices is {settings.devices!r}, but shards is {settings.shards!r}: the rows are in "
            "the shards"
        )


def _check_traces(settings: ServeSettings) -> None:
    endpoint = settings.otlp_endpoint
    if not endpoint:
        if settings.trace_share:
            raise ValueError(
                f"trace_share is {settings.trace_share:g}, but traces go nowhere: give "
                "otlp_endpoint, too"
            )
        return
    try:
        url = urlsplit(endpoint)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        is_url = is_url and not (url.query or url.fragment)  # /v1/traces is added to the path
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(
            f"otlp_endpoint is {endpoint!r}, expected http:// or https://, a host and perhaps a "
            "path, without a query"
        )
    try:
        is_installed = all(map(find_spec, OPENTELEMETRY))
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        raise ValueError(
            f"otlp_endpoint is {endpoint!r}, but OpenTelemetry is not installed: "
            "pip install 'embedserve[otel]'"
        )


def _check_proxies(settings: ServeSettings) -> None:
    for one in settings.trusted_proxy:
        try:
            ipaddress.ip_network(one)
        except ValueError:
            raise ValueError(
                f"trusted_proxy has {one!r}, expected an address or a network such as 10.0.0.0/8"
            ) from None


def _check_security(settings: ServeSettings) -> None:
    for name in ("host", "management_host"):
        if not getattr(settings, name):
            raise ValueError(f"{name} is '', expected an address; 0.0.0.0 is all interfaces")
    for kind in ("tls", "shard"):
        cert, key = getattr(settings, f"{kind}_cert"), getattr(settings, f"{kind}_key")
        if bool(cert) != bool(key):
            raise ValueError(
                f"{kind}_cert is {cert!r} and {kind}_key is {key!r}: a certificate and its key "
                "come together"
            )
    if settings.shard_cert and not settings.shard_ca:
        raise ValueError(
            f"shard_cert is {settings.shard_cert!r}, but certificates are shown over TLS only: "
            "give shard_ca, too"
        )
    if settings.tls_client_ca and not settings.tls_cert:
        raise ValueError(
            f"tls_client_ca is {settings.tls_client_ca!r}, but clients show certificates over TLS "
            "only: give tls_cert and tls_key, too"
        )
    has_more = settings.tls_cert or settings.tokens or settings.management_port >= 0
    has_more = has_more or settings.http_uds or settings.grpc_uds
    if settings.grpc_server == "grpcio" and has_more:
        raise ValueError(
            "grpc_server is 'grpcio', which is there to compare with and has neither TLS nor "
            "tokens, no management port and no Unix sockets: use native"
        )
    host = settings.management_host
    if settings.management_port >= 0 and not settings.tokens and not is_loopback(host):
        raise ValueError(
            f"management_host is {host!r}, which others than this host reach: "
            "give tokens, too, or use 127.0.0.1"
        )


def _check_unix_sockets(settings: ServeSettings) -> None:
    uds_mode(settings)
    for name in ("http_uds", "grpc_uds"):
        path = getattr(settings, name)
        nbytes = len(os.fsencode(path))
        if nbytes > UDS_PATH_BYTES_MAX:
            raise ValueError(
                f"{name} is {path!r}, {nbytes} bytes: the path of a Unix socket has at most "
                f"{UDS_PATH_BYTES_MAX}"
            )
        if "\0" in path:
            raise ValueError(f"{name} is {path!r}, which is no path")
    if settings.http_uds and settings.http_uds == settings.grpc_uds:
        raise ValueError(
            f"http_uds and grpc_uds are both {settings.http_uds!r}: either takes all protocols, "
            "give one of them"
        )


def _check_shared_memory(settings: ServeSettings) -> None:
    """Raises ValueError if the prefix is invalid, or with settings that shared memory does not
    support: ports beyond loopback, several workers or the grpcio server."""
    prefix = settings.shared_memory
    if not prefix:
        return
    if not prefix.startswith("/") or "/" in prefix[1:] or not prefix.isprintable():
        raise ValueError(
            f"shared_memory is {prefix!r}, expected a slash and what names begin with, such as "
            "/ranker-, or / for any"
        )
    start = f"shared_memory is {prefix!r}, but"
    names = ["host"] if settings.management_port < 0 else ["host", "management_host"]
    for name in names:
        host = getattr(settings, name)
        if not is_loopback(host):
            raise ValueError(
                f"{start} {name} is {host!r}, which others than this host reach: use 127.0.0.1"
            )
    if settings.workers > 1:
        raise ValueError(
            f"{start} workers is {settings.workers}, and a region is registered with one worker "
            "only: use 1"
        )
    if settings.grpc_server == "grpcio":
        raise ValueError(f"{start} grpc_server is 'grpcio', which has none: use native")


def check_device(settings: ServeSettings, device_type: str) -> None:
    """Raises ValueError for settings that contradict tables on ``device_type``: "cpu", "cuda", or
    ``devices`` before it is resolved."""
    # An alias also says which deltas its version may have, which may change anywhere. Another
    # version stays out, with the reason.
    only_deltas = settings.follow == "alias" and settings.deltas != "none"
    is_followed = settings.follow != "none" and not only_deltas
    if is_followed and (why := why_fixed(settings, device_type)):
        way_out = ": use none" if device_type == "cuda" else ""
        raise ValueError(f"follow is {settings.follow!r}, but {why}{way_out}")
    if device_type != "cuda":
        return
    if settings.workers > 1:
        raise ValueError(
            f"workers is {settings.workers}, but the tables go to GPUs, and each worker would copy "
            "them there again: use 1"
        )
    if settings.tables == "resident":
        raise ValueError(
            "tables is 'resident', but they are copied to GPUs, and nothing reads them in this "
            "host's memory: use mapped"
        )
