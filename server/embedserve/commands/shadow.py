"""`embedserve shadow`: how the results of shadow versions differ from those of the served versions.

It reads the metrics of a running server, which metrics/shadow_metrics.py describes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.samples import Sample

from embedserve.commands.running_server import ServerClient
from embedserve.commands.server_metrics import read_samples
from embedserve_store.terminal.aligned_columns import grid, plain, show, write

PREFIX = "embedserve_shadow_"
Comparison = tuple[str, ...]
"""Label values that identify a comparison: (model, alias, version, against)."""
COMPARISON = ("model", "alias", "version", "against")


def _by_comparison(samples: Iterable[Sample]) -> dict[Comparison, dict[tuple[str, ...], float]]:
    """Returns values by comparison, then by (metric name, values of all other labels)."""
    counts: dict[Comparison, dict[tuple[str, ...], float]] = defaultdict(dict)
    for sample in samples:
        name = sample.name.removeprefix(PREFIX).removesuffix("_total")
        labels = dict(sample.labels)
        comparison = tuple(labels.pop(label, "") for label in COMPARISON)
        key = (name, *(labels[label] for label in sorted(labels)))
        counts[comparison][key] = sample.value
    return counts


def show_shadows(client: ServerClient) -> None:
    """Prints how each shadow version differs from the served version, key by key.

    Raises:
        ConnectionError, OSError, ValueError: as read_samples.
    """
    shadows = _by_comparison(read_samples(client, [PREFIX]))
    if not shadows:
        write(
            f"{client.url}: no version runs in the shadow of another (embedserve alias … --shadow)"
        )
    for (model, alias, version, against), counts in shadows.items():
        batches = {
            outcome: int(counts.get(("batches", outcome), 0))
            for outcome in ("compared", "skipped", "failed")
        }
        rejected = int(counts.get(("refused",), 0))
        why = " (the server's log says why)" if batches["failed"] else ""
        name = f"{model}@{alias}" if alias else model
        title = (
            f"{name} version {version} against {against}: {batches['compared']} batches compared, "
            f"{batches['skipped']} skipped, {batches['failed']} failed{why}, "
            f"{rejected} requests rejected"
        )
        _show(title, counts)


def _show(title: str, counts: dict[tuple[str, ...], float]) -> None:
    numbers = ("vectors", "empty", "cosine", "relative L2")
    table = grid("table", "key", *numbers, "ids without a row", numbers=numbers)
    for key, table_name in [one[1:] for one in counts if one[0] == "vectors"]:
        vectors, distance, squared, squares, empty = (
            counts.get((name, key, table_name), 0.0)
            for name in ("vectors", "cosine_distance", "squared_difference", "squares", "empty")
        )
        feature = key.partition("@")[0]
        ours, theirs = (
            int(counts.get(("unknown_ids", feature, of), 0)) for of in ("shadow", "served")
        )
        cosine = f"{1 - distance / vectors:.6f}" if vectors else "-"
        relative = f"{math.sqrt(squared / squares):.2e}" if squares else "-"
        unknown = f"{ours}, {theirs} there" if ours or theirs else "none"
        cells = (table_name, key, str(int(vectors)), str(int(empty)), cosine, relative, unknown)
        table.add_row(*map(plain, cells))
    show(title, table)
