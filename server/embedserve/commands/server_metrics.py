"""The metrics of a running server, for commands that show what it counted.

What answers may be no server of ours, slow or endless: its bytes and the time are bounded.
"""

from __future__ import annotations

import queue
import threading
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from embedserve.commands.server_address import address_of
from embedserve.terminal.console import printable

TIMEOUT_S = 10.0
"""For all of it."""
METRICS_BYTES_MAX = 32 << 20
"""A server of a thousand features and tables shows a megabyte or two."""
SAID_MAX = 200
"""Characters of a line that cannot be read."""
OURS = "embedserve_"


def read_samples(
    url: str, names: Sequence[str], timeout_s: float = TIMEOUT_S, bytes_max: int = METRICS_BYTES_MAX
) -> list[Sample]:
    """What the server at ``url`` shows of metrics whose names begin with one of ``names``.

    Raises:
        ConnectionError: it cannot be asked, or its metrics take too long or are too large.
        ValueError: ``url`` is none, or what answers is no embedserve.
    """
    address = f"{address_of(url, 'http://localhost:8000')}/metrics"
    lines = _read(url, address, timeout_s, bytes_max).split("\n")
    if not any(line.startswith(OURS) for line in lines):
        raise ValueError(f"{url}: is no embedserve: its /metrics has nothing of {OURS}…")
    text = "".join(f"{line}\n" for line in lines if line.startswith(tuple(names)))
    try:
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples]
    except (ValueError, LookupError, TypeError) as error:
        said = printable(str(error)[:SAID_MAX])
        raise ValueError(f"{url}: its metrics are not what Prometheus reads: {said}") from error


def _read(url: str, address: str, timeout_s: float, bytes_max: int) -> str:
    answer = _ask(address, timeout_s, bytes_max)
    if answer is None:
        reason: object = f"they are not all there after {timeout_s:g} s"
    elif isinstance(answer, Exception):
        reason = getattr(answer, "reason", answer)
    elif len(answer) > bytes_max:
        reason = f"they are over {bytes_max} bytes"
    else:
        return answer.decode(errors="replace")
    raise ConnectionError(f"{url}: its metrics cannot be read: {reason}")


def _ask(address: str, timeout_s: float, bytes_max: int) -> bytes | Exception | None:
    """None where it takes too long: the thread that asks is left behind, as the timeout of a socket
    is that of one wait and begins anew with every byte."""
    answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(address, timeout=timeout_s) as answer:
                answers.put(answer.read(bytes_max + 1))
        except (OSError, ValueError, HTTPException) as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return None
