"""Reads of a version's tables by a running server, from its metrics (request_metrics.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from prometheus_client.samples import Sample

from embedserve.commands.running_server import ServerClient
from embedserve.commands.server_metrics import read_samples
from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.access_counts import AccessCounts, is_divided_by_rows
from embedserve_store.plans.plan import Plan
from embedserve_store.terminal.sanitize import sanitize

TABLE_LOOKUPS = "embedserve_table_lookups_total"
ROW_WISE_LOOKUPS = "embedserve_row_wise_lookups_total"
RANK_LOOKUPS = "embedserve_rank_lookups_total"
RANK_BYTES = "embedserve_rank_read_bytes_total"
TABLE_BYTES = "embedserve_table_bytes"
REPLANNED = "embedserve_model_replanned"
NAMES = (TABLE_LOOKUPS, ROW_WISE_LOOKUPS, RANK_LOOKUPS, RANK_BYTES, TABLE_BYTES, REPLANNED)
COUNT_END = 2.0**63
LISTED_MAX = 20
Counts = dict[str, dict[tuple[str, ...], float]]
"""Values by metric, then by the values of the labels "table" and "rank"."""


@dataclass(frozen=True)
class AccessStats:
    """Rows and bytes that a server has read since it began to count.

    Attributes:
        reads: rows read by table; for row-wise tables also by rank.
        table_bytes: int [world_size], bytes of tables on each rank.
        lookups, read_bytes: [world_size], rows and bytes read on each rank.
        is_stored_plan: whether the server uses the stored plan.
    """

    reads: AccessCounts
    table_bytes: Sequence[float]
    lookups: Sequence[float]
    read_bytes: Sequence[float]
    is_stored_plan: bool

    @property
    def world_size(self) -> int:
        return len(self.table_bytes)


def read_access_stats(client: ServerClient, manifest: Manifest, stored: Plan) -> AccessStats:
    """Returns what the server has read of a version whose plan is ``stored``, summed over all names
    that it is served by.

    Raises:
        ConnectionError, OSError, ValueError: as read_samples.
        StoreError: the server does not serve this version or serves other tables, does not count
            lookups, or has read nothing yet.
    """
    url, samples = client.url, read_samples(client, NAMES)
    aliases = _aliases(samples, url, manifest.model, str(manifest.version))
    counts = _counts(samples, url, manifest.model, aliases)
    by_table = {name: n for (name,), n in counts[TABLE_LOOKUPS].items()}
    names = [table.name for table in manifest.tables]
    if sorted(by_table) != sorted(names):
        raise StoreError(
            f"{url}: its tables of {manifest.model} version {manifest.version} are "
            f"{_listed(by_table)}, in the store they are {_listed(names)}"
        )
    if not sum(by_table.values()):
        raise StoreError(
            f"{url}: no row of {manifest.model} version {manifest.version} was read since it began "
            "to count: send it a request first"
        )
    nbytes, lookups, read_bytes = (
        _per_rank(counts[name], url, name) for name in (TABLE_BYTES, RANK_LOOKUPS, RANK_BYTES)
    )
    by_rank: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for (name, rank), count in counts[ROW_WISE_LOOKUPS].items():
        by_rank[name][(rank,)] = count
    divided = {name: _per_rank(of, url, ROW_WISE_LOOKUPS) for name, of in by_rank.items()}
    if {len(nbytes)} != {len(lookups), len(read_bytes), *map(len, divided.values()), len(nbytes)}:
        raise ValueError(f"{url}: its metrics are of different numbers of ranks")
    is_stored = not any(counts[REPLANNED].values()) and stored.world_size == len(nbytes)
    starts = {
        table.name: _starts(table, stored if is_stored else None, len(nbytes))
        for table in manifest.tables
        if table.name in divided
    }
    return AccessStats(
        AccessCounts(by_table, divided, starts), nbytes, lookups, read_bytes, is_stored
    )


def _aliases(samples: Iterable[Sample], url: str, model: str, version: str) -> dict[str, str]:
    """Returns the aliases under which ``model`` is served in ``version``, each mapped to that
    version."""
    tables = [sample.labels for sample in samples if sample.name == TABLE_LOOKUPS]
    served = dict.fromkeys((of.get("model", ""), of.get("version", "")) for of in tables)
    if (model, version) not in served:
        shown = _listed([f"{name} version {number}" for name, number in served])
        raise StoreError(
            f"{url}: does not serve {model} version {version}: "
            f"{f'it serves {shown}' if shown else 'it counts no lookups by table'}"
        )
    of_model = [of for of in tables if of["model"] == model and of["version"] == version]
    return {of.get("alias", ""): version for of in of_model}


def _counts(samples: Iterable[Sample], url: str, model: str, aliases: Mapping[str, str]) -> Counts:
    """Collects the metrics of one model version. Counters are summed over all ``aliases``; of other
    metrics one alias's value is kept."""
    counts: Counts = {name: {} for name in NAMES}
    for sample in samples:
        labels, name = sample.labels, sample.name
        version = aliases.get(labels.get("alias", ""))
        is_of_it = labels.get("model") == model and labels.get("version", version) == version
        if name not in counts or version is None or not is_of_it:
            continue
        if not 0 <= sample.value < COUNT_END:
            raise ValueError(f"{url}: {name} is {sample.value}, expected a count")
        key = tuple(labels[one] for one in ("table", "rank") if one in labels)
        before = counts[name].get(key, 0.0) if name.endswith("_total") else 0.0
        counts[name][key] = before + sample.value
    return counts


def _listed(names: Collection[str]) -> str:
    """Returns up to LISTED_MAX of ``names``, sanitized because they may come from an untrusted
    server."""
    more = ", …" if len(names) > LISTED_MAX else ""
    return sanitize(", ".join(islice(names, LISTED_MAX))) + more


def _per_rank(counts: Mapping[tuple[str, ...], float], url: str, name: str) -> list[float]:
    try:
        return [counts[(str(rank),)] for rank in range(max(1, len(counts)))]
    except KeyError as error:
        raise ValueError(f"{url}: {name} has no rank {error.args[0][0]}") from None


def _starts(table: TableSpec, stored: Plan | None, world_size: int) -> list[int]:
    """Returns the first row of each rank; if the server replanned, the boundaries that torchrec
    chooses."""
    if stored is not None and is_divided_by_rows(stored.tables[table.name]):
        return [shard.row_offset for shard in stored.tables[table.name].shards]
    rows = -(-table.num_embeddings // world_size)
    return [min(rank * rows, table.num_embeddings) for rank in range(world_size)]
