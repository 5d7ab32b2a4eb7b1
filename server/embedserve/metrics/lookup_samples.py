"""Prometheus samples of the access counts, by feature, table and rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from embedserve.metrics.model_metrics import VERSION_LABELS, VersionMetrics, version_labels
from embedserve_store.plans.access_counts import reads_per_rank, row_read_bytes


def collect_lookups(versions: Iterable[VersionMetrics]) -> Iterator[Metric]:
    """Yields the lookup metrics. Bytes are derived from lookups. Only row-wise tables are counted
    by rank; all other counts by table and rank are derived from the counted ids."""
    feature_ids = _family("feature_ids", "Ids that were asked, by feature.", "feature")
    table_lookups = _family("table_lookups", "Rows read of a table.", "table")
    table_bytes = _family("table_read_bytes", "Bytes of rows read of a table.", "table")
    divided = _family(
        "row_wise_lookups",
        "Rows read on a rank of a table that is divided by its rows: an estimate, from some of the "
        "batches.",
        "table",
        "rank",
    )
    rank_lookups = _family(
        "rank_lookups",
        "Rows, or parts of rows, read on a rank; of row_wise tables an estimate.",
        "rank",
    )
    rank_bytes = _family(
        "rank_read_bytes", "Bytes of rows read on a rank; of row_wise tables an estimate.", "rank"
    )
    for version in versions:
        model = version.model
        labels, plan = version_labels(model), model.plan
        reads = version.reads()
        for feature, count in zip(model.features, version.total_asked_ids(), strict=True):
            feature_ids.add_metric([*labels, feature], count)
        for table in model.tables:
            count = reads.by_table[table.name]
            row_bytes = row_read_bytes(plan.tables[table.name], table, model.device_type)
            table_lookups.add_metric([*labels, table.name], count)
            table_bytes.add_metric([*labels, table.name], count * row_bytes)
        for name, counts in reads.by_rank.items():
            for rank, count in enumerate(counts):
                divided.add_metric([*labels, name, str(rank)], count)
        per_rank = reads_per_rank(plan, model.tables, reads, model.device_type)
        for family, counts in zip((rank_lookups, rank_bytes), per_rank, strict=True):
            for rank, count in enumerate(counts):
                family.add_metric([*labels, str(rank)], count)
    yield from (feature_ids, table_lookups, table_bytes, divided, rank_lookups, rank_bytes)


def _family(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"embedserve_{name}", text, labels=[*VERSION_LABELS, *labels])
