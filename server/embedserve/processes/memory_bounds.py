"""What requests and connections can make a process use at most: the bounds of all, added up.

With the rows it is what a server needs: settings.md says the first, `embedserve plan --kubernetes`
the second.
"""

from __future__ import annotations

from dataclasses import dataclass

from embedserve.batching.batcher import AT_ONCE
from embedserve.codec_executor import ASIDE_BYTES_MAX
from embedserve.config import Limits, ServeSettings
from embedserve.wire.server import LOOK_BYTES

CONNECTION_BYTES = 16 << 10
"""Of a connection that holds nothing."""
CONNECTION_TLS_BYTES = 64 << 10
"""What one over TLS has more: 20 KiB as it begins, and the buffers that large requests and answers
have made OpenSSL's grow to."""
ID_BYTES = 8 + 4
"""An id and its weight."""
STRING_BYTES = 88
"""Of an id that came as a string, which is kept for messages, and the integer that it may be."""
JSON_BYTES_PER_VALUE = 16
FREED_SHARE = 1 / 4
"""malloc does not give everything back; under attack half of what it had was free."""
PROCESS_BYTES = 400 << 20
"""Of a worker that is idle: Python, torch and what was compiled. The demo's has 320 MB."""
WORK_BYTES = 600 << 20
"""What common requests under way take, of all workers."""
READ_BYTES_PER_VALUE = 128
"""Of a value of JSON, or a string, as Python has it."""


def memory_parts(limits: Limits, has_tls: bool = False, gpus: int = 0) -> dict[str, int]:
    """Bytes by what takes them, beside the tables and what an idle server has.

    Args:
        gpus: each with a replica, which has batches of its own; 0: lookups are the CPU's. What
            PyTorch keeps pinned beyond what a batch takes is not counted.
    """
    values_max = limits.request_output_bytes_max // 4
    lone_ids = 2 * ID_BYTES * limits.request_ids_max  # as they came, and joined to a batch
    lone = lone_ids + 2 * limits.request_output_bytes_max
    batch = 2 * ID_BYTES * limits.batch_ids_max + 2 * limits.batch_output_bytes_max
    parts = {
        "connections": CONNECTION_BYTES * limits.connections_max,
        "requests that have not come whole, answers that are not read": (
            limits.connection_bytes_max + LOOK_BYTES
        ),
        "large requests and answers that wait to be read and written": ASIDE_BYTES_MAX,
        "one of them that is": max(
            JSON_BYTES_PER_VALUE * values_max,
            READ_BYTES_PER_VALUE * limits.request_values_max + limits.request_text_bytes_max,
        ),
        # small requests and large
        "the queue of a model": 2 * (ID_BYTES + STRING_BYTES) * limits.queue_ids_max,
        # on GPUs each may be of one large request
        "its batches": gpus * AT_ONCE * max(lone, batch) if gpus else lone + batch,
    }
    if has_tls:
        parts["TLS of connections"] = CONNECTION_TLS_BYTES * limits.connections_max
    return parts | {"freed between what is in use": int(FREED_SHARE * sum(parts.values()))}


def memory_bytes_max(limits: Limits, has_tls: bool = False, gpus: int = 0) -> int:
    """Their sum, for one model."""
    return sum(memory_parts(limits, has_tls, gpus).values())


@dataclass(frozen=True)
class Rows:
    """Bytes of one version.

    Attributes:
        mapped: of the files that are read as rows and ids are asked for.
        copied: of shards that each worker copies.
    """

    mapped: int
    copied: int = 0


@dataclass(frozen=True)
class ServerMemory:
    """What a server needs, in bytes.

    Attributes:
        rows: held at once, hot ones where they are mapped: page cache counts, too.
        processes: what its processes take when idle.
        work: what common requests under way take.
        clients: what clients can make it take beyond these.
    """

    rows: int
    processes: int
    work: int
    clients: int

    @property
    def common(self) -> int:
        return self.rows + self.processes + self.work

    @property
    def most(self) -> int:
        return self.rows + self.processes + max(self.work, self.clients)


def server_memory(
    rows: Rows, settings: ServeSettings, hot: float = 1.0, gpus: int = 0
) -> ServerMemory:
    """Of one model.

    Args:
        hot: which part of mapped rows memory is to hold, 0 to 1; the others come from the disk.
        gpus: as of memory_parts.
    """
    part = 1.0 if settings.tables == "resident" else hot
    versions = 1 if settings.follow == "none" else 2  # the next is read beside the one that answers
    held = int(part * rows.mapped) + settings.workers * rows.copied
    return ServerMemory(
        rows=versions * held,
        processes=settings.workers * PROCESS_BYTES,
        work=WORK_BYTES,
        clients=settings.workers * memory_bytes_max(settings.limits, bool(settings.tls_cert), gpus),
    )
