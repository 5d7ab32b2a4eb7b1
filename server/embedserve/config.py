"""Settings as frozen values with units in their names, and the limits that they set.

Each setting is written once, here, with its default and its sentence for the command line,
which makes a flag, an EMBEDSERVE_* variable and a TOML key of it (commands/serve_options.py).
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

MIB = 1 << 20
LIMIT_MAX = 2**31 - 1
"""grpcio keeps its limits in 32 bits, and none of ours needs more."""


def setting(default: Any, sentence: str, **bounds: float) -> Any:
    """A field with its help text, and with "min" and "max" where it has them."""
    return field(default=default, metadata={"help": sentence, **bounds})


def limit(default: float, sentence: str) -> Any:
    return setting(default, sentence, min=0, max=LIMIT_MAX)


@dataclass(frozen=True)
class Limits:
    """How much work the server takes on, in a request, in a batch and in the queue."""

    body_bytes_max: int = limit(32 * MIB, "Bytes of one request's body or message.")
    request_examples_max: int = limit(65_536, "Examples of one request.")
    request_features_max: int = limit(4096, "Features that one request names.")
    request_ids_max: int = limit(1_048_576, "Ids of one request.")
    request_values_max: int = limit(
        131_072,
        "Values of one request that are read one by one: of JSON its commas and opening brackets "
        "are counted, of protobuf its keys, strings and what is not packed, of Arrow its strings.",
    )
    request_text_bytes_max: int = limit(
        4 * MIB,
        "Bytes of one request's JSON, of a protobuf message beside its numbers, or of Arrow's "
        "strings.",
    )
    request_output_bytes_max: int = limit(64 * MIB, "Bytes of one answer's float32 values.")
    batch_ids_max: int = limit(
        262_144, "Ids of a batch of several requests; a larger request is a batch of its own."
    )
    batch_output_bytes_max: int = limit(8 * MIB, "Bytes of such a batch's float32 values.")
    queue_examples_max: int = limit(
        131_072,
        "Examples waiting before requests are refused; of one connection, half of them.",
    )
    queue_ids_max: int = limit(
        2_097_152, "Ids waiting before requests are refused; of one connection, half of them."
    )
    connections_max: int = limit(
        16_384, "Open connections of a process; past it new ones are closed."
    )
    connection_age_s_max: float = limit(
        0.0,
        "Seconds, a tenth more or less, after which a client is asked to connect anew, as behind "
        "several servers it must to be spread over them again: over HTTP/2 by GOAWAY, over "
        "HTTP/1.1 by Connection: close; what is under way goes on. 0: never.",
    )
    connection_bytes_max: int = limit(
        1024 * MIB,
        "Bytes that the connections of a process hold, in all: requests that have not come whole, "
        "and answers that clients have not read; past it those with most are cut.",
    )
    shared_memory_regions_max: int = limit(
        256, "Regions of shared memory that are registered at once; by one token, half of them."
    )
    shared_memory_bytes_max: int = limit(
        1024 * MIB, "Bytes of all these regions; of those of one token, half of them."
    )
    delay_ms_max: float = limit(
        0.0, "How long a lone request waits for company, for GPUs; 0: it does not."
    )
    inline_bytes_max: int = limit(
        8 * MIB,
        "Rows read and values written by a batch that runs on the event loop's thread, about a "
        "millisecond of work; a larger one runs in a thread of its own.",
    )

    def said(self, name: str) -> str:
        """What a caller whose request is over the limit ``name`` is told of it."""
        return f"the limit is {getattr(self, name)} (--{name.replace('_', '-')})"


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class ServeSettings:
    """Everything that `embedserve serve` can be told."""

    store: str
    """A folder, or the URL of a remote store."""
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    allowed_host: tuple[str, ...] = setting(
        (),
        "A name that requests may have as their Host, beside localhost and loopback addresses, "
        "where a port on a loopback address has neither tokens nor TLS: a web site can make its "
        "own name resolve to this host. May be repeated; * for any, where a proxy checks it.",
    )
    trusted_proxy: tuple[str, ...] = setting(
        (),
        "Address or network, such as 10.0.0.0/8, of a proxy whose Forwarded or X-Forwarded-For "
        "header tells the log a client's address. May be repeated.",
    )
    http_port: int = setting(8000, "REST, health and metrics; 0: any.", min=0, max=65535)
    grpc_port: int = setting(8001, "gRPC; 0: any.", min=0, max=65535)
    management_port: int = setting(
        -1,
        "Takes metrics, the pages and which models there are off the two ports, where health alone "
        "stays; 0: any; -1: they stay there.",
        min=-1,
        max=65535,
    )
    management_host: str = setting(
        "127.0.0.1",
        "Address of the management port. On a loopback address it asks for no token and takes no "
        "TLS; any other needs --tokens.",
    )
    http_uds: str = setting(
        "",
        "Path of a Unix socket that takes, from callers on this host, what the HTTP port takes, "
        "without TLS. Default: none.",
    )
    grpc_uds: str = setting("", "The same beside the gRPC port. Default: none.")
    uds_mode: str = setting(
        "600", "Octal mode of the files of both: who may write may connect, 660 for a group."
    )
    shared_memory: str = setting(
        "",
        "What the names of files in /dev/shm begin with that callers may have ids read from and "
        "answers written to, by the Open Inference Protocol: such as /ranker-, or / for any. Needs "
        "one worker, and ports that this host alone reaches. Default: off.",
    )
    grpc_server: str = setting(
        "native",
        "native: by this server itself, on both ports; grpcio: by grpcio's own server on the gRPC "
        "port, slower, to compare with.",
    )
    tls_cert: str = setting(
        "",
        "PEM file of this server's certificate and those that lead to its root; both ports then "
        "take TLS only. It and the two below are read again when they change.",
    )
    tls_key: str = setting("", "PEM file of the certificate's key, not locked by a password.")
    tls_client_ca: str = setting(
        "",
        "PEM file of those whose certificates clients must show, and of their revocation lists, if "
        "any. Default: clients need none.",
    )
    tokens: str = setting(
        "",
        "File of those who may ask, a line for each, as `embedserve token` makes them; read again "
        "when it changes. Default: everybody may.",
    )
    labels: str = setting(
        "",
        "JSON file of what people call ids, for the console: "
        '`{"MODEL": {"TABLE": {"ID": "LABEL"}}}`; read at the start.',
    )
    model: tuple[str, ...] = setting(
        (),
        "A model to serve, NAME, NAME@VERSION or NAME@ALIAS; may be repeated, also for several "
        "versions of one model, of which the first answers what names none. Default: all of the "
        "store, the newest version of each.",
    )
    follow: str = setting(
        "none",
        "alias: models named NAME@ALIAS move with it while they are served; latest: those named "
        "without a version move to each newer one, too; none: what is served changes at a start, "
        "and at a SIGHUP.",
    )
    follow_s: float = setting(
        10.0, "Seconds between two looks at what the store says.", min=0.1, max=86400
    )
    wait: bool = setting(
        False, "Wait for the models while the store does not have them, or cannot be reached."
    )
    default_model: str = setting(
        "", "Answers requests that name none. Default: the model, if only one is served."
    )
    cache: str = setting(
        "", "Folder for what is pulled from a remote store. Default: ~/.cache/embedserve."
    )
    devices: str = setting(
        "auto",
        "cuda; cpu, as many ranks in memory as the plan has; cpu:N, so many; or auto: GPUs where "
        "they hold all models, else cpu.",
    )
    gpu_layout: str = setting(
        "auto",
        "Of several GPUs: replicas, each has all models, and a batch goes to the one with the "
        "least to do; shards, the tables are divided over them by the plan; auto: replicas where "
        "all models fit on each, else shards.",
    )
    strict_plan: bool = setting(
        False, "Refuse to start where the stored plan does not fit the host."
    )
    lookup: str = setting(
        "compiled",
        "compiled: traced or scripted to tensor operations; eager: DistributedModelParallel's own "
        "forward on a KeyedJaggedTensor, slower, to compare and to debug.",
    )
    workers: int = setting(
        1,
        "Processes that share the ports and the tables, one for each core to serve from.",
        min=1,
        max=256,
    )
    worker_hang_s: float = setting(
        10.0,
        "Seconds without a sign of life after which one of several workers is replaced, and a "
        "server of one process ends with exit code 1, to be started again; 2 or more, 0: never.",
        min=0,
        max=3600,
    )
    tables: str = setting(
        "mapped",
        "mapped: read from the files as they are needed; resident: first copied into memory, in "
        "huge pages where the host has them.",
    )
    verify: bool = setting(False, "First check every byte of the store against its checksums.")
    drain_s: float = setting(
        10.0, "Seconds that accepted requests may take after SIGTERM.", min=0, max=3600
    )
    log_level: str = setting("info", "debug, info, warning or error.")
    log_format: str = setting("text", "text, or json: an object for each line of the log.")
    slow_ms: float = setting(
        1000.0,
        "Requests that take longer are logged, with where their time went; 0: none are.",
        min=0,
        max=LIMIT_MAX,
    )
    server_timing: bool = setting(
        False,
        "Every answer tells where its time went: in the header Server-Timing, in gRPC's trailers.",
    )
    otlp_endpoint: str = setting(
        "",
        "URL of an OpenTelemetry collector that takes OTLP over HTTP, such as "
        "http://localhost:4318, which the spans of requests are sent to; needs the extra `otel`. "
        "Default: there are no traces.",
    )
    trace_share: float = setting(
        0.0,
        "Percent of the requests without a traceparent that are traced; one with it says for "
        "itself whether it is.",
        min=0,
        max=100,
    )
    limits: Limits = field(default_factory=Limits)


UDS_PATH_BYTES_MAX = 107
"""What the kernel has room for."""
UDS_MODE_MAX = 0o777
UDS_MODE_DIGITS_MAX = 4
HANG_S_MIN = 2.0
"""Workers give a sign of life every half second."""
OPENTELEMETRY = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
CHOICES = {
    "follow": ("none", "alias", "latest"),
    "gpu_layout": ("auto", "replicas", "shards"),
    "grpc_server": ("native", "grpcio"),
    "lookup": ("compiled", "eager"),
    "tables": ("mapped", "resident"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}


def check_settings(settings: ServeSettings) -> None:
    """Raises ValueError for settings that make no sense, whatever the host and the store."""
    for name, choices in CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    if 0 < settings.worker_hang_s < HANG_S_MIN:
        raise ValueError(
            f"worker_hang_s is {settings.worker_hang_s:g}, which a busy host's workers would pass: "
            f"use {HANG_S_MIN:g} or more, or 0 for never"
        )
    _check_security(settings)
    _check_proxies(settings)
    _check_traces(settings)
    _check_unix_sockets(settings)
    check_device(settings, settings.devices)


def why_fixed(settings: ServeSettings, device_type: str) -> str:
    """Why what is served cannot change while the server runs; "" where it can."""
    if device_type == "cuda":
        return (
            "the tables go to GPUs, where a version that comes would have to fit beside the one "
            "that answers, which is not seen to yet: use none"
        )
    if settings.workers > 1 and settings.tables == "resident":
        return (
            "a version that comes while workers run cannot be copied into memory that they share: "
            "use --tables mapped, or --workers 1"
        )
    return ""


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(f"otlp_endpoint is {endpoint!r}, expected http:// or https:// and a host")
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
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise ValueError(
            f"tls_cert is {settings.tls_cert!r} and tls_key is {settings.tls_key!r}: a certificate "
            "and its key come together"
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


def uds_mode(settings: ServeSettings) -> int:
    """Of the files of Unix sockets. ValueError for what is no mode."""
    mode = settings.uds_mode
    if not mode or len(mode) > UDS_MODE_DIGITS_MAX or mode.strip("01234567"):
        raise ValueError(f"uds_mode is {mode!r}, expected octal digits such as 600")
    if int(mode, 8) > UDS_MODE_MAX:
        raise ValueError(f"uds_mode is {mode!r}, expected {UDS_MODE_MAX:o} at most")
    return int(mode, 8)


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


def check_device(settings: ServeSettings, device_type: str) -> None:
    """Raises ValueError for settings that make no sense where tables are held so."""
    if settings.follow != "none" and (why := why_fixed(settings, device_type)):
        raise ValueError(f"follow is {settings.follow!r}, but {why}")
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
