"""Settings as frozen dataclasses with units in their names, and the limits among them.

Each setting is defined once, here, with its default and its help text. The command line derives a
flag, an EMBEDSERVE_* variable and a TOML key from it (commands/serve_options.py).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
LIMIT_MAX = 2**31 - 1
"""Upper bound of every limit. grpcio stores its limits in 32 bits, and none of ours needs more."""


def setting(default: Any, sentence: str, **more: float | str) -> Any:
    """Returns a dataclass field with its help text and ``more`` of its option: bounds "min" and
    "max", and "envvar"."""
    return field(default=default, metadata={"help": sentence, **more})


def limit(default: float, sentence: str) -> Any:
    return setting(default, sentence, min=0, max=LIMIT_MAX)


@dataclass(frozen=True)
class Limits:
    """Limits on the work that the server accepts, per request, batch, queue and process."""

    body_bytes_max: int = limit(32 * MIB, "Bytes of one request body or message.")
    request_examples_max: int = limit(
        65_536, "Examples in one request, and in a batch of several requests."
    )
    request_features_max: int = limit(4096, "Features named by one request.")
    request_ids_max: int = limit(1_048_576, "Ids in one request.")
    request_values_max: int = limit(
        131_072,
        "Values of one request that are parsed one at a time: commas and opening brackets of "
        "JSON; keys, strings and unpacked numbers of protobuf; strings of Arrow.",
    )
    request_text_bytes_max: int = limit(
        4 * MIB,
        "Bytes of one request's JSON, of a protobuf message without its numbers, or of Arrow's "
        "strings.",
    )
    request_output_bytes_max: int = limit(64 * MIB, "Bytes of float32 values in one response.")
    batch_ids_max: int = limit(
        262_144, "Ids in a batch of several requests; a larger request is a batch of its own."
    )
    batch_output_bytes_max: int = limit(
        8 * MIB, "Bytes of float32 values in a batch of several requests."
    )
    queue_examples_max: int = limit(
        131_072,
        "Examples in each of a version's two queues; the server rejects requests beyond it. One "
        "caller (without tokens one connection) may hold half.",
    )
    queue_ids_max: int = limit(
        2_097_152,
        "Ids in each of a version's two queues (of small and of large requests); the server "
        "rejects requests beyond it. One caller (without tokens one connection) may hold half.",
    )
    connections_max: int = limit(
        16_384, "Open connections of a process; the server closes new ones beyond it."
    )
    connection_age_s_max: float = limit(
        0.0,
        "Seconds, plus or minus a tenth, after which the server asks a client to reconnect, so "
        "that load balancers spread clients again: GOAWAY over HTTP/2, Connection: close over "
        "HTTP/1.1. Requests in flight complete. 0: never.",
    )
    connection_bytes_max: int = limit(
        1024 * MIB,
        "Bytes held by all connections of a process: incomplete requests, cached headers, unread "
        "responses. Beyond it the server drops headers, then closes connections that hold most.",
    )
    shared_memory_regions_max: int = limit(
        256, "Registered shared-memory regions; one token may register half, rounded up."
    )
    shared_memory_bytes_max: int = limit(
        1024 * MIB, "Bytes of all registered regions; one token may register half."
    )
    delay_ms_max: float = limit(
        0.0, "Milliseconds that a request waits for others to join its batch. 0: none."
    )
    inline_bytes_max: int = limit(
        8 * MIB,
        "Bytes that a batch may read and write on the event loop's thread, about a millisecond of "
        "work; a larger batch runs in a lookup thread.",
    )

    def describe(self, name: str) -> str:
        """Returns the value and the flag of limit ``name``, as a part of an error message."""
        return f"the limit is {getattr(self, name)} (--{name.replace('_', '-')})"


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class ServeSettings:
    """All settings of `embedserve serve`."""

    store: str
    """Path of a folder, or URL of a remote store."""
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    allowed_host: tuple[str, ...] = setting(
        (),
        "Host name that requests may use besides localhost and loopback addresses. It is "
        "checked on loopback ports without tokens and TLS, because a web site can make its own "
        "name resolve to this host. Repeatable; * allows any, for use behind a proxy that "
        "checks it.",
    )
    trusted_proxy: tuple[str, ...] = setting(
        (),
        "Address or network, such as 10.0.0.0/8, of a proxy whose Forwarded or X-Forwarded-For "
        "header gives the client address for the log. Repeatable.",
    )
    http_port: int = setting(
        8000, "Port for REST, health and metrics. 0: any free port.", min=0, max=65535
    )
    grpc_port: int = setting(8001, "Port for gRPC. 0: any free port.", min=0, max=65535)
    management_port: int = setting(
        -1,
        "Separate port for metrics, docs, console and model listing; the main ports then serve "
        "only inference, health and callers' shared memory. 0: any free port; -1: no separate "
        "port.",
        min=-1,
        max=65535,
    )
    management_host: str = setting(
        "127.0.0.1",
        "Address of the management port. On a loopback address it needs neither tokens nor "
        "TLS; any other address requires --tokens.",
    )
    http_uds: str = setting(
        "",
        "Path of a Unix socket that serves local clients as the HTTP port does, without TLS. "
        "Default: none.",
    )
    grpc_uds: str = setting(
        "",
        "Path of a Unix socket that serves local clients as the gRPC port does, without TLS. "
        "Default: none.",
    )
    uds_mode: str = setting(
        "600",
        "Octal mode of both socket files; write permission allows connecting, 660 allows a group.",
    )
    shared_memory: str = setting(
        "",
        "Prefix of the /dev/shm files that clients may register for shared-memory input and "
        "output (Open Inference Protocol), such as /ranker-; / allows any. Requires one worker "
        "and loopback ports. Default: off.",
    )
    grpc_server: str = setting(
        "native",
        "native: this server's own HTTP/2 on both ports; grpcio: grpcio's server on the gRPC "
        "port, slower, for comparison.",
    )
    tls_cert: str = setting(
        "",
        "PEM file with the server certificate and its chain; both ports then require TLS. "
        "Reloaded on change, as are the next two files.",
    )
    tls_key: str = setting("", "PEM file with the certificate's private key, without a password.")
    tls_client_ca: str = setting(
        "",
        "PEM file with the CAs of client certificates, and their revocation lists, if any; "
        "clients must then present one. Default: no client certificates.",
    )
    tokens: str = setting(
        "",
        "Token file, one JSON object per line as written by `embedserve token`; reloaded on "
        "change. Default: no authentication.",
    )
    labels: str = setting(
        "",
        'JSON file with names for ids, shown by the console: `{"MODEL": {"TABLE": {"ID": '
        '"LABEL"}}}`; read at startup.',
    )
    model: tuple[str, ...] = setting(
        (),
        "Model to serve: NAME, NAME@VERSION or NAME@ALIAS. Repeatable, also for several "
        "versions of one model; the first then answers requests that name none. Default: the "
        "newest version of every model in the store.",
    )
    follow: str = setting(
        "none",
        "none: served versions change only at startup, on SIGHUP and by embedserve admin; alias: "
        "models given as NAME@ALIAS follow their alias; latest: models given without a version "
        "also follow the newest version.",
    )
    follow_s: float = setting(10.0, "Seconds between two polls of the store.", min=0.1, max=86400)
    part: str = setting(
        "",
        "Part of the tables that this server holds, as a shard of a model that is published with "
        "--hosts: NUMBER/COUNT, such as 0/8 or 7/8. Default: all tables.",
    )
    versions_held: int = setting(
        2,
        "Newest versions that a shard holds, besides those that aliases name.",
        min=2,
        max=64,
    )
    shards: str = setting(
        "",
        "Shards of a router, which looks rows up there: dns:NAME-{part}:PORT, with the number of "
        "a part; file:PATH, a JSON file of addresses by part, reloaded on change; or ray:NAME, "
        "shards of embedserve cluster --backend ray. Default: this server has the rows.",
    )
    shard_timeout_ms: float = setting(
        500.0,
        "Milliseconds that a router waits for one call to a shard, never past the caller's "
        "deadline.",
        min=1,
        max=LIMIT_MAX,
    )
    hedge_share: float = setting(
        0.1,
        "Largest fraction of a router's lookups in a part that are also sent to a second replica, "
        "because the first is slow. 0: none.",
        min=0,
        max=1,
    )
    partial_dtype: str = setting(
        "float32",
        "Dtype in which shards send their sums to a router: float32; float16: half the bytes "
        "between hosts, but each sum is rounded, and beyond 65504 it becomes infinite.",
    )
    local_bytes: int = setting(
        0,
        "Bytes of the tables that a router holds itself, so that lookups in them need no call: the "
        "smallest of those that are whole on one part, up to this sum. 0: none.",
        min=0,
    )
    row_cache: int = setting(
        0,
        "Bytes of memory, in each worker and for each version, in which a router keeps rows that "
        "are looked up often, so that they need no call. 0: none.",
        min=0,
    )
    on_missing: tuple[str, ...] = setting(
        (),
        "Answer of a router for rows of a part without a replica. fail: the request fails; zeros: "
        "the response lacks these rows, and counts them by feature. TABLE=fail or TABLE=zeros: for "
        "one table. Repeatable. Default: fail.",
    )
    shard_ca: str = setting(
        "",
        "PEM file with the CAs of the shards' certificates; a router then connects over TLS. "
        "Reloaded on change, as are the next three files. Default: no TLS.",
    )
    shard_cert: str = setting("", "PEM file with the certificate that a router shows its shards.")
    shard_key: str = setting(
        "", "PEM file with that certificate's private key, without a password."
    )
    shard_token: str = setting("", "File with the token that a router sends to its shards.")
    deltas: str = setting(
        "none",
        "none: rows are those of the versions; follow: rows that training pushes as deltas are "
        "applied while the server runs.",
    )
    delta_poll_s: float = setting(
        0.0,
        "Seconds between two polls for deltas, 0.01 or more. 0: 0.05 for a folder, 0.25 for a URL.",
        min=0,
        max=3600,
    )
    delta_memory: int = setting(
        0,
        "Bytes of memory for changed rows of each model. 0: a tenth of the version's tables, at "
        "least 256 MiB.",
        min=0,
    )
    delta_undo: int = setting(
        64,
        "Steps that can be undone from memory, as far as --delta-memory allows. A step is one "
        "delta, or several that waited. An undo that goes further back reads the store.",
        min=0,
        max=10_000,
    )
    delta_new_ids_percent: float = setting(
        10.0,
        "Ids that deltas may add to a vocabulary, remove or give another row, in percent of its "
        "ids. If that is fewer than 1000 ids, 1000 are allowed. 0: none.",
        min=0,
        max=1000,
    )
    delta_key: str = setting(
        "",
        "PEM file with Ed25519 public keys; a delta is applied only if one of them has signed it. "
        "Read at startup; requires the extra `signatures`. Default: no signature is needed.",
    )
    delta_notify: str = setting(
        "",
        "Broker that notifies the server of deltas before the next poll: redis://HOST:PORT or "
        "redis://HOST:PORT/DB, nats://HOST:PORT, over TLS rediss:// or tls:// (NATS), or a file "
        "with the URL. Requires the extra `redis` or `nats`. Default: deltas are found by polling.",
    )
    wait: bool = setting(
        False,
        "Wait at startup for models that the store does not have yet, and for a store that is "
        "unreachable.",
    )
    default_model: str = setting(
        "", "Model for requests that name none. Default: the only model, if one is served."
    )
    cache: str = setting(
        "", "Folder for versions pulled from a remote store. Default: ~/.cache/embedserve."
    )
    devices: str = setting(
        "auto",
        "auto: GPUs if they hold all models, else cpu; cuda; cpu: as many in-memory ranks as "
        "the plan has; cpu:N: N in-memory ranks.",
    )
    gpu_layout: str = setting(
        "auto",
        "Use of several GPUs. replicas: each GPU holds all models, and a batch goes to the "
        "least busy one; shards: the plan divides the tables over them; auto: replicas if all "
        "models fit on each GPU, else shards.",
    )
    strict_plan: bool = setting(False, "Refuse to start if the stored plan does not fit the host.")
    lookup: str = setting(
        "compiled",
        "compiled: traced or scripted to tensor operations; eager: DistributedModelParallel's "
        "own forward on a KeyedJaggedTensor, slower, for comparison and debugging.",
    )
    workers: int = setting(
        1,
        "Processes that share the ports and the tables; use one per core that serves.",
        min=1,
        max=256,
    )
    worker_hang_s: float = setting(
        10.0,
        "Seconds without a heartbeat after which a worker is replaced; a server of one process "
        "exits with code 1 instead, so that it is restarted. At least 2; 0: never. The process "
        "that applies deltas has at least 180 s.",
        min=0,
        max=3600,
    )
    tables: str = setting(
        "mapped",
        "mapped: read from the files on demand; resident: copied into memory first, in huge "
        "pages if the host has them.",
    )
    verify: bool = setting(
        False, "Check every byte of the store against its checksums before serving."
    )
    drain_s: float = setting(
        10.0, "Seconds that accepted requests may take after SIGTERM.", min=0, max=3600
    )
    log_level: str = setting("info", "debug, info, warning or error.")
    log_format: str = setting("text", "text, or json: one JSON object per line.")
    slow_ms: float = setting(
        1000.0,
        "Requests that take longer are logged with their latency breakdown. 0: none are logged.",
        min=0,
        max=LIMIT_MAX,
    )
    server_timing: bool = setting(
        False,
        "Return the latency breakdown with every response: Server-Timing header, or gRPC trailer.",
    )
    otlp_endpoint: str = setting(
        "",
        "URL of an OpenTelemetry collector (OTLP over HTTP), such as http://localhost:4318, "
        "that receives the spans of requests; requires the extra `otel`. Default: no traces.",
    )
    trace_share: float = setting(
        0.0,
        "Sampling rate, in percent, for requests without a traceparent header; with one, its "
        "sampled flag decides.",
        min=0,
        max=100,
    )
    limits: Limits = field(default_factory=Limits)

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor runs the server's processes."""
        return self.workers > 1 or self.deltas != "none"


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bracketed(host: str) -> str:
    """Returns ``host`` as written before a port; IPv6 addresses are put in brackets."""
    return f"[{host}]" if ":" in host else host
