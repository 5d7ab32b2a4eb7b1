"""Bound of the memory that clients can make a process hold: the sum of its limits.

Together with the rows it is the memory that a server needs. settings.md shows the sum for the
default limits; `embedserve plan --kubernetes` computes the memory of a server.

Not counted is what only operators start: a management port, whose connections have small limits of
their own (MANAGEMENT_LIMITS in server.py), and a shadow, which looks one batch at a time up again.
threat-model.md names what has no bound yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from embedserve.batching.batcher import BATCHES_PER_REPLICA
from embedserve.config import Limits, ServeSettings
from embedserve.fanout.values_budget import (
    BATCHES_MAX,
    PADDED_TIMES,
    SMALL_BYTES_MAX,
    VALUES_BYTES_MAX,
)
from embedserve.pipeline.codec_executor import WAITING_BYTES_MAX
from embedserve.wire.management_turns import WAITING_BODY_BYTES_MAX
from embedserve.wire.wire_server import CHECK_BYTES

CONNECTION_BYTES = 16 << 10
"""Bytes of an idle connection."""
CONNECTION_TLS_BYTES = 64 << 10
"""Additional bytes of a TLS connection: 20 KiB at first, and OpenSSL's buffers after large requests
and responses made them grow."""
ID_BYTES = 8 + 4
"""Bytes of an id and its weight."""
STRING_BYTES = 88
"""Bytes of an id that came as a string: the string, which is kept for messages, and the integer it
may be converted to."""
LENGTH_BYTES = 4
"""Bytes of the length of a bag: one for each feature of each example."""
FEATURES = 100
"""Features of a model whose tables are not known."""
MANAGEMENT_QUEUES = 4
"""Queues of management requests: on ports and on Unix sockets one for probes and one for others."""
JSON_BYTES_PER_VALUE = 16
"""Bytes of a float32 value as JSON, at most, with its comma."""
FREED_SHARE = 1 / 4
"""Fraction added for freed memory that malloc does not return. Under attack, half of malloc's
memory was free."""
PROCESS_BYTES = 400 << 20
"""Bytes of an idle worker: Python, torch and compiled lookups. The demo's worker has 320 MB."""
WORK_BYTES = 600 << 20
"""Bytes that ordinary requests in flight take, over all workers."""
READ_BYTES_PER_VALUE = 128
"""Bytes of a JSON value or a string as a Python object."""
DECOMPRESSED_COPIES = 2
"""Copies of a compressed body once it is decompressed: the chunks, which are then joined."""


def memory_by_purpose(
    limits: Limits,
    has_tls: bool = False,
    gpus: int = 0,
    parts: int = 0,
    features: int = FEATURES,
    versions: int = 1,
) -> dict[str, int]:
    """Returns bytes by purpose, in addition to the tables and an idle server.

    Args:
        gpus: number of GPUs, each with a replica that has batches of its own; 0: lookups run on the
            CPU. Pinned memory that PyTorch caches beyond one batch is not counted.
        parts: parts of the model that a router serves; each may return almost a whole result. 0 for
            a server that is no router.
        features: features of the model.
        versions: versions of the model whose queues may be full at once. A version that was
            replaced has a queue until it has drained.
    """
    values_max = limits.request_output_bytes_max // 4
    bytes_per_example = LENGTH_BYTES * features
    lengths = bytes_per_example * limits.request_examples_max
    # Twice: ids and lengths as received and as joined, values as looked up and as written. Arrays
    # of positions that joining takes meanwhile are not counted.
    lone = 2 * (ID_BYTES * limits.request_ids_max + lengths + limits.request_output_bytes_max)
    batch = 2 * (ID_BYTES * limits.batch_ids_max + lengths + limits.batch_output_bytes_max)
    if parts:
        largest = PADDED_TIMES * parts * limits.request_output_bytes_max
        # the values that parts return: the budget of the process, and small batches of each version
        batches = max(VALUES_BYTES_MAX, largest) + versions * BATCHES_MAX * SMALL_BYTES_MAX
        batches += versions * (lone + batch + (BATCHES_MAX - 1) * max(lone, batch))
    elif gpus:
        batches = versions * gpus * BATCHES_PER_REPLICA * max(lone, batch)
    else:
        batches = versions * (lone + batch)
    queue = (ID_BYTES + STRING_BYTES) * limits.queue_ids_max
    queue += bytes_per_example * limits.queue_examples_max
    bytes_by_purpose = {
        "connections": CONNECTION_BYTES * limits.connections_max,
        "incomplete requests, cached headers, and responses that clients have not read": (
            limits.connection_bytes_max + CHECK_BYTES
        ),
        "bodies of management requests, waiting": MANAGEMENT_QUEUES * WAITING_BODY_BYTES_MAX,
        "large requests to decode and large responses to encode, waiting": WAITING_BYTES_MAX,
        "the large request or response that is decoded or encoded": max(
            JSON_BYTES_PER_VALUE * values_max,
            READ_BYTES_PER_VALUE * limits.request_values_max
            + limits.request_text_bytes_max
            + DECOMPRESSED_COPIES * limits.body_bytes_max,
        ),
        # a queue for small requests and a queue for large ones
        "the queue of a model": versions * 2 * queue,
        # on GPUs, and in a router, each batch may be one large request
        "its batches that are looked up": batches,
    }
    if has_tls:
        bytes_by_purpose["TLS of connections"] = CONNECTION_TLS_BYTES * limits.connections_max
    freed = int(FREED_SHARE * sum(bytes_by_purpose.values()))
    return bytes_by_purpose | {"free memory between blocks in use (fragmentation)": freed}


def memory_bytes_max(limits: Limits, has_tls: bool = False, **counts: int) -> int:
    """Returns the sum of memory_by_purpose, which takes the same arguments, for one model."""
    return sum(memory_by_purpose(limits, has_tls, **counts).values())


@dataclass(frozen=True)
class ServerMemory:
    """Bytes that a server needs.

    Attributes:
        versions: versions whose rows are in memory at once.
        rows: bytes of rows in memory at once; for mapped rows the hot ones, which are in the page
            cache.
        processes: bytes of the idle processes.
        work: bytes of ordinary requests in flight.
        clients: bytes that clients can make the server use beyond rows and idle processes.
    """

    versions: int
    rows: int
    processes: int
    work: int
    clients: int

    @property
    def common(self) -> int:
        """Bytes under ordinary load."""
        return self.rows + self.processes + self.work

    @property
    def most(self) -> int:
        """Bytes at most, whatever clients send."""
        return self.rows + self.processes + max(self.work, self.clients)


def server_memory(
    settings: ServeSettings,
    mapped: int,
    copied: int = 0,
    hot: float = 1.0,
    gpus: int = 0,
    parts: int = 0,
    *,
    features: int,
    names: int = 1,
) -> ServerMemory:
    """Returns the memory that a server of one model needs. With follow=none it has no room for the
    next version, which an administrator's load or a reload brings. A shard that follows holds
    versions_held versions.

    Args:
        mapped: bytes of a version's files that are read on demand, as rows and ids are requested.
        copied: bytes of a version's shards that each worker copies.
        hot: fraction of mapped rows to hold in memory, 0 to 1; other rows are read from disk.
        gpus, parts, features: as in memory_by_purpose.
        names: number of names under which versions of the model are served, such as the aliases
            stable and canary.
    """
    share = 1.0 if settings.tables == "resident" else hot
    if settings.follow == "none":
        versions = names
    else:
        # one version is loaded at a time, beside those of all names
        versions = settings.versions_held if settings.part else names + 1
    rows_bytes = int(share * mapped) + settings.workers * copied
    clients = memory_bytes_max(
        settings.limits,
        bool(settings.tls_cert),
        gpus=gpus,
        parts=parts,
        features=features,
        versions=versions,
    )
    return ServerMemory(
        versions=versions,
        rows=versions * rows_bytes,
        processes=settings.workers * PROCESS_BYTES,
        work=WORK_BYTES,
        clients=settings.workers * clients,
    )
