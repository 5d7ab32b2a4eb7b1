"""Settings as frozen values with units in their names, and the limits that they set.

The command line fills them: a flag beats an EMBEDSERVE_* variable beats the TOML file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """How much work the server takes on, in requests, in a batch and in the queue."""

    body_bytes_max: int = 64 * MIB
    """Of one request's body or message."""
    request_examples_max: int = 65_536
    request_output_bytes_max: int = 256 * MIB
    """Of one answer's float32 values."""
    batch_ids_max: int = 262_144
    """A request with more ids is a batch of its own."""
    batch_output_bytes_max: int = 32 * MIB
    """Likewise, of a batch's float32 values."""
    queue_examples_max: int = 131_072
    """Examples waiting; the next request is refused."""
    queue_ids_max: int = 16_777_216
    """Ids waiting, likewise."""
    delay_ms_max: float = 0.0
    """How long a lone request waits for company. 0: a batch is what is there."""
    inline_bytes_max: int = 8 * MIB
    """Rows read and values written by a batch that runs on the event loop's own thread: under
    about a millisecond. Larger ones run beside it."""


@dataclass(frozen=True)
class ServeSettings:
    """Everything that `embedserve serve` can be told."""

    store: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    model: tuple[str, ...] = ()
    """Models to serve; all of the store if empty."""
    default_model: str = ""
    """Answers requests that name none; the only model served if empty."""
    devices: str = "auto"
    """auto, cuda or cpu:N."""
    strict_plan: bool = False
    verify: bool = False
    """Check every byte of the served versions against their checksums before ready."""
    drain_s: float = 10.0
    """How long accepted requests may take to be answered after SIGTERM."""
    log_level: str = "info"
    limits: Limits = field(default_factory=Limits)
