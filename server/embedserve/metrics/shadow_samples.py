"""Prometheus samples of the differences between shadow versions and the served versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from embedserve.metrics.model_metrics import VERSION_LABELS, VersionMetrics, version_labels

LABELS = (*VERSION_LABELS, "against")
"""Labels of shadow metrics. "version" is the shadow version, "against" the version that it is
compared with."""
PER_KEY = (
    (
        "vectors",
        "Vectors that were compared, without those that both versions answered with zeros.",
    ),
    ("cosine_distance", "Sum of the cosine distances (1 - cos) of vectors."),
    ("squared_difference", "Sum of the squared differences of values."),
    ("squares", "Sum of the squares of the values that were answered."),
    (
        "empty",
        "Vectors that both versions answered with zeros, as of empty bags: none of the others.",
    ),
)


def collect_shadows(versions: Iterable[VersionMetrics]) -> Iterator[Metric]:
    """Yields the shadow metrics of every version that has been compared with another."""
    batches = CounterMetricFamily(
        "embedserve_shadow_batches",
        "Batches that a version in the shadow was to look up, too, by outcome: compared, skipped "
        "(while another was compared) or failed.",
        labels=[*LABELS, "outcome"],
    )
    refused = CounterMetricFamily(
        "embedserve_shadow_refused",
        "Requests of compared batches that it would have refused.",
        labels=LABELS,
    )
    per_key = [
        CounterMetricFamily(f"embedserve_shadow_{name}", text, labels=[*LABELS, "table", "key"])
        for name, text in PER_KEY
    ]
    unknown = CounterMetricFamily(
        "embedserve_shadow_unknown_ids",
        "Ids of compared batches without a row: in the version in the shadow, and in the other.",
        labels=[*LABELS, "feature", "of"],
    )
    for version in versions:
        shadow, model, of = version.shadow, version.model, version.of_this_version()
        if not shadow.against:
            continue
        labels = [*version_labels(model), str(shadow.against)]
        for outcome, count in shadow.batches(of).items():
            batches.add_metric([*labels, outcome], count)
        refused.add_metric(labels, shadow.refused(of))
        tables = [column.table.name for column in model.manifest.columns]
        for family, sums in zip(per_key, shadow.per_key(of).tolist(), strict=True):
            for table, key, value in zip(tables, model.keys, sums, strict=True):
                family.add_metric([*labels, table, key], value)
        for whose, counts in zip(("shadow", "served"), shadow.unknown_ids(of), strict=True):
            for feature, count in zip(model.features, counts.tolist(), strict=True):
                unknown.add_metric([*labels, feature, whose], count)
    yield from (batches, refused, *per_key, unknown)
