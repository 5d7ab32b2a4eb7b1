"""What requests and connections can make a process use at most: the bounds of all, added up."""

from __future__ import annotations

from embedserve.config import Limits
from embedserve.exchange import ASIDE_BYTES_MAX
from embedserve.wire.server import LOOK_BYTES

CONNECTION_BYTES = 16 << 10
"""Of a connection that holds nothing."""
ID_BYTES = 8 + 4
"""An id and its weight."""
STRING_BYTES = 88
"""Of an id that came as a string, which is kept for messages, and the integer that it may be."""
JSON_BYTES_PER_VALUE = 16
FREED_SHARE = 1 / 4
"""malloc does not give everything back; under attack half of what it had was free."""
READ_BYTES_PER_VALUE = 128
"""Of a value of JSON, or a string, as Python has it."""


def memory_parts(limits: Limits) -> dict[str, int]:
    """Bytes by what takes them, beside the tables and what an idle server has."""
    values_max = limits.request_output_bytes_max // 4
    lone_ids = 2 * ID_BYTES * limits.request_ids_max  # as they came, and joined to a batch
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
        "its batches": lone_ids + 2 * limits.request_output_bytes_max + batch,
    }
    return parts | {"freed between what is in use": int(FREED_SHARE * sum(parts.values()))}


def memory_bytes_max(limits: Limits) -> int:
    """Their sum, for one model."""
    return sum(memory_parts(limits).values())
