"""Reads the metrics of a running server, for commands that show its counters."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from embedserve.commands.running_server import ServerClient
from embedserve_store.terminal.sanitize import sanitize

TIMEOUT_S = 10.0
METRICS_BYTES_MAX = 32 << 20
"""Bytes of a /metrics response. A server with a thousand features and tables sends one or two
megabytes."""
ERROR_TEXT_MAX = 200
"""Characters of a parser error that are quoted."""
OURS = "embedserve_"


def read_samples(
    client: ServerClient,
    names: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    bytes_max: int = METRICS_BYTES_MAX,
) -> list[Sample]:
    """Returns the samples of the server's metrics whose names begin with one of ``names``.

    Raises:
        ConnectionError, OSError, ValueError: as ServerClient.request.
        ValueError: the server is not embedserve.
    """
    url = client.url
    page = client.request("/metrics", timeout_s=timeout_s, bytes_max=bytes_max)
    lines = page.decode(errors="replace").split("\n")
    if not any(line.startswith(OURS) for line in lines):
        raise ValueError(f"{url}: is no embedserve: its /metrics has nothing of {OURS}…")
    text = "".join(f"{line}\n" for line in lines if line.startswith(tuple(names)))
    try:
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples]
    except (ValueError, LookupError, TypeError) as error:
        reason = sanitize(str(error)[:ERROR_TEXT_MAX])
        raise ValueError(f"{url}: its metrics are not what Prometheus reads: {reason}") from error
