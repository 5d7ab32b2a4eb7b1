"""Metrics of several workers, families and samples of the text of /metrics, and counts of ids
without a row."""

from dataclasses import replace

import numpy as np
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from embedserve.lookup_types import Batch
from embedserve.metrics.metrics import CounterRoom, Metrics
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.metrics.request_metrics import VersionMetrics
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters
from embedserve.model_info import ModelInfo


def workers_of(count: int, *models: ModelInfo) -> tuple[SharedCounters, list[Metrics]]:
    """Returns the metrics of ``count`` ready workers that serve ``models``, and their counters."""
    slots = SharedCounters(count, CounterRoom(len(models), COLUMNS_MIN).cells)
    for worker in range(count):
        slots.set_ready(worker, True)
    return slots, [Metrics(models, WorkerCounters(slots, worker)) for worker in range(count)]


def with_version(model: ModelInfo, number: int) -> ModelInfo:
    return replace(model, manifest=replace(model.manifest, version=number))


def parse_families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def sample_value(families: dict[str, Metric], sample_name: str, **labels: str) -> float:
    """Returns the one sample with this name and these labels."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == sample_name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{sample_name} {labels}: {found}"
    return float(found[0])


def families_of(metrics: Metrics) -> dict[str, Metric]:
    return parse_families(generate_latest(metrics.registry()).decode())


def count_unknown_ids(version: VersionMetrics, count: int) -> None:
    """Counts a batch with ``count`` ids without a row of each feature."""
    counts = np.full(len(version.model.features), count)
    batch = Batch(np.empty(0, np.int64), np.empty(0, np.int32), None, [1], 1)
    batch.ids_per_feature, batch.unknown_counts = counts, counts[None]
    version.lookups.observe(batch)
