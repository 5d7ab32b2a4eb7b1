"""Table of all Prometheus families that the server exports, in the order of /metrics.

A new metric is a row here and a sample that one of the classes beside this module yields under the
row's name. A histogram of a version needs its buckets in request_metrics.py, too. docs/metrics.md
is generated from the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from embedserve.metrics.histogram import HistogramSamples

Sample = tuple[str, Sequence[str], float | HistogramSamples]
"""(name of the family, values of its labels, value)."""

COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
NAME = ("model", "alias")
"""Labels of a served name. "alias" is the text behind the "@" of --model. Where there is none it is
empty, which Prometheus treats as no label."""
VERSION = (*NAME, "version")
"""Labels of values that start from zero for each version; their series end with the version."""
SHADOW = (*VERSION, "against")
"""Labels of shadow metrics. "version" is the shadow version, "against" the version that it is
compared with."""
SHADOW_KEY = (*SHADOW, "table", "key")


class Family(NamedTuple):
    """A family of series. ``unit`` is that of a value."""

    name: str
    kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    labels: tuple[str, ...]
    unit: str
    help: str


# fmt: off
FAMILIES = (
    Family("process_cpu_seconds", COUNTER, (), "seconds",
           "User and system CPU time of all workers, in seconds."),
    Family("process_start_time_seconds", GAUGE, (), "seconds",
           "Start time of the oldest worker, in seconds since the Unix epoch."),
    Family("process_virtual_memory_bytes", GAUGE, (), "bytes",
           "Virtual memory of all workers, in bytes."),
    Family("process_resident_memory_bytes", GAUGE, (), "bytes",
           "Resident memory of all workers, in bytes. Shared pages are counted in each worker."),
    Family("process_open_fds", GAUGE, (), "files",
           "Open file descriptors of all workers."),
    Family("process_max_fds", GAUGE, (), "files",
           "Sum of the limits on open file descriptors of all workers."),
    Family("embedserve_log_lines_dropped", COUNTER, (), "lines",
           "Log lines that workers dropped because the reader of the log was too slow."),
    Family("embedserve_workers", GAUGE, (), "processes",
           "Worker processes that are ready. 0 while the models load."),
    Family("embedserve_worker_restarts", COUNTER, (), "processes",
           "Worker processes that ended and were replaced."),
    Family("embedserve_worker_hangs", COUNTER, (), "processes",
           "Worker processes that were killed because they stopped sending heartbeats."),
    Family("embedserve_connections", GAUGE, (), "connections",
           "Open connections of clients, without those of `--grpc-server grpcio`."),
    Family("embedserve_connections_refused", COUNTER, (), "connections",
           "Connections that were closed when they were accepted, because a worker had as many as "
           "it may have."),
    Family("embedserve_requests", COUNTER, ("protocol", "outcome"), "requests",
           "Completed requests, by protocol and outcome: OK, an error code, or CANCELLED."),
    Family("embedserve_request_seconds", HISTOGRAM, ("protocol",), "seconds",
           "Seconds from the arrival of a request to its encoded response, error or cancellation."),
    Family("embedserve_response_bytes", COUNTER, ("protocol",), "bytes",
           "Bytes of encoded responses."),
    Family("embedserve_caller_requests", COUNTER, ("caller", "outcome"), "requests",
           "Embed requests of each caller with a named token or certificate, by outcome."),
    Family("embedserve_model_requests", COUNTER, (*VERSION, "outcome"), "requests",
           "Requests routed to a version, by outcome: OK, an error code, or CANCELLED. Requests "
           "rejected before a version was chosen are not included."),
    Family("embedserve_model_request_seconds", HISTOGRAM, VERSION, "seconds",
           "Seconds from the arrival of a request routed to a version to its encoded response, "
           "error or cancellation."),
    Family("embedserve_tls_handshakes", COUNTER, ("outcome",), "handshakes",
           "Completed and failed TLS handshakes, by outcome."),
    Family("embedserve_tls_certificate_expiry_timestamp_seconds", GAUGE, (), "seconds",
           "Expiry of the server's certificate, in seconds since the Unix epoch. With several "
           "workers the earliest."),
    Family("embedserve_queue_requests", GAUGE, NAME, "requests",
           "Requests waiting for a batch."),
    Family("embedserve_queue_examples", GAUGE, NAME, "examples",
           "Examples in the requests waiting for a batch."),
    Family("embedserve_model_damaged", GAUGE, NAME, "",
           "1 if the model's files changed while it was served. The server is then not ready."),
    Family("embedserve_model_wanted_version", GAUGE, NAME, "",
           "Version that the store says should be served. 0 if the store is not watched."),
    Family("embedserve_model_load_seconds", GAUGE, NAME, "seconds",
           "Seconds from finding the served version to serving it. 0 for the version served at the "
           "start."),
    Family("embedserve_model_behind_seconds", GAUGE, NAME, "seconds",
           "Seconds since the store was found to name a version that is not served. 0 if "
           "it names the served version."),
    Family("embedserve_model_refused", GAUGE, NAME, "",
           "1 if the version that the store names cannot be served and the previous one stays. The "
           "log and /models state the reason."),
    Family("embedserve_model_switches", COUNTER, NAME, "switches",
           "Switches of the model to another version."),
    Family("embedserve_delta_seq", GAUGE, NAME, "",
           "Last delta whose rows are served."),
    Family("embedserve_delta_wanted_seq", GAUGE, NAME, "",
           "Last delta that is known to be in the store and may be applied."),
    Family("embedserve_delta_lag_seconds", GAUGE, NAME, "seconds",
           "Age of the oldest delta that is not applied. 0 if all are applied."),
    Family("embedserve_delta_look_age_seconds", GAUGE, NAME, "seconds",
           "Age of the last poll of the store for deltas. 0 before the first."),
    Family("embedserve_delta_stalled", GAUGE, NAME, "",
           "1 if no delta is applied, because one is missing or damaged or the store does not "
           "respond. The log and /models state the reason."),
    Family("embedserve_delta_full", GAUGE, NAME, "",
           "1 if no delta is applied, because the memory for changed rows or ids is full."),
    Family("embedserve_delta_held", GAUGE, NAME, "",
           "1 if no delta is applied, because an administrator holds them."),
    Family("embedserve_delta_notify_connected", GAUGE, NAME, "",
           "1 if the broker of --delta-notify is connected, else 0. Absent without that setting."),
    Family("embedserve_delta_rows_changed", GAUGE, NAME, "rows",
           "Rows that differ from those of the version. A row of tables that share features counts "
           "once."),
    Family("embedserve_delta_ids_changed", GAUGE, NAME, "",
           "Ids of vocabularies that are new, have another row or are removed since the version."),
    Family("embedserve_delta_memory_bytes", GAUGE, NAME, "bytes",
           "Bytes of memory that changed rows take."),
    Family("embedserve_delta_rows", COUNTER, NAME, "rows",
           "Rows of applied deltas."),
    Family("embedserve_delta_bytes", COUNTER, NAME, "bytes",
           "Bytes of the files of applied deltas."),
    Family("embedserve_delta_undo", COUNTER, NAME, "",
           "Undos that were applied."),
    Family("embedserve_delta_refused", COUNTER, NAME, "",
           "Reasons for which deltas were not applied, each counted once until it is gone."),
    Family("embedserve_delta_apply_seconds", HISTOGRAM, NAME, "seconds",
           "Seconds of a step that read, checked and applied deltas."),
    Family("embedserve_delta_freshness_seconds", HISTOGRAM, NAME, "seconds",
           "Seconds from training's reading of a delta's rows to their being served."),
    Family("embedserve_shard_calls", COUNTER, ("part", "outcome"), "calls",
           "Calls of a router to a part of the tables, by outcome. A call that took several "
           "replicas counts once. A part that no version had at the start is not counted "
           "until a restart."),
    Family("embedserve_shard_seconds", HISTOGRAM, ("part",), "seconds",
           "Seconds of a call to a part, retries and hedges included, whatever its outcome."),
    Family("embedserve_shard_hedges", COUNTER, ("part",), "calls",
           "Calls of a second replica of a part because the first one took long."),
    Family("embedserve_shard_retries", COUNTER, ("part",), "calls",
           "Calls of another replica of a part because one failed or took too long."),
    Family("embedserve_shard_hung", COUNTER, ("part",), "calls",
           "Calls of another replica of a part because one was silent."),
    Family("embedserve_shard_bytes", COUNTER, ("part", "direction"), "bytes",
           "Bytes of the messages of calls to a part: sent, of every call of a replica, and "
           "received, of the responses that were used."),
    Family("embedserve_shard_replicas", GAUGE, ("part", "model", "version", "state"), "replicas",
           "Replicas of a part that may be called for a version: the smallest number over the "
           "ready workers. The state is served, or next for a version that the store names and "
           "that does not serve yet."),
    Family("embedserve_queue_wait_seconds", HISTOGRAM, VERSION, "seconds",
           "Seconds that a request waited for its batch."),
    Family("embedserve_batch_examples", HISTOGRAM, VERSION, "examples",
           "Examples in a batch."),
    Family("embedserve_batch_ids", HISTOGRAM, VERSION, "ids",
           "Ids in a batch."),
    Family("embedserve_lookup_seconds", HISTOGRAM, VERSION, "seconds",
           "Seconds of the lookup of a batch."),
    Family("embedserve_missing_parts", COUNTER, (*VERSION, "part"), "batches",
           "Batches that a router answered without a part, because no replica of it was available "
           "(--on-missing zeros)."),
    Family("embedserve_row_cache_hits", COUNTER, VERSION, "ids",
           "Ids whose rows a router had in its row cache (--row-cache)."),
    Family("embedserve_unknown_ids", COUNTER, (*VERSION, "feature"), "ids",
           "Ids without a row that were skipped or looked up as the default row, by feature."),
    Family("embedserve_model_version", GAUGE, NAME, "",
           "Served version of the model."),
    Family("embedserve_model_replanned", GAUGE, NAME, "",
           "1 if the stored sharding plan did not fit this host and another plan was made."),
    Family("embedserve_table_bytes", GAUGE, (*VERSION, "rank"), "bytes",
           "Bytes of table rows on a rank, for each replica."),
    Family("embedserve_feature_ids", COUNTER, (*VERSION, "feature"), "ids",
           "Requested ids, by feature."),
    Family("embedserve_table_lookups", COUNTER, (*VERSION, "table"), "rows",
           "Rows read from a table."),
    Family("embedserve_table_read_bytes", COUNTER, (*VERSION, "table"), "bytes",
           "Bytes of rows read from a table."),
    Family("embedserve_row_wise_lookups", COUNTER, (*VERSION, "table", "rank"), "rows",
           "Rows read from a row-wise sharded table on a rank, estimated from sampled batches."),
    Family("embedserve_rank_lookups", COUNTER, (*VERSION, "rank"), "rows",
           "Rows, or parts of rows, read on a rank. Reads of row-wise tables are estimated."),
    Family("embedserve_rank_read_bytes", COUNTER, (*VERSION, "rank"), "bytes",
           "Bytes of rows read on a rank. Reads of row-wise tables are estimated."),
    Family("embedserve_shadow_batches", COUNTER, (*SHADOW, "outcome"), "batches",
           "Batches sampled for a shadow version, by outcome: compared, skipped (the previous "
           "comparison was still running) or failed."),
    Family("embedserve_shadow_refused", COUNTER, SHADOW, "requests",
           "Requests of compared batches that the shadow version would have rejected."),
    Family("embedserve_shadow_vectors", COUNTER, SHADOW_KEY, "vectors",
           "Compared vectors, without those that are zero in both versions."),
    Family("embedserve_shadow_cosine_distance", COUNTER, SHADOW_KEY, "",
           "Sum of the cosine distances (1 - cos) of the vectors."),
    Family("embedserve_shadow_squared_difference", COUNTER, SHADOW_KEY, "",
           "Sum of the squared differences of the values."),
    Family("embedserve_shadow_squares", COUNTER, SHADOW_KEY, "",
           "Sum of the squares of the served version's values."),
    Family("embedserve_shadow_empty", COUNTER, SHADOW_KEY, "vectors",
           "Vectors that are zero in both versions, such as those of empty bags. The other shadow "
           "metrics leave them out."),
    Family("embedserve_shadow_unknown_ids", COUNTER, (*SHADOW, "feature", "of"), "ids",
           'Ids of compared batches without a row in the shadow version (of="shadow") or in the '
           'served version (of="served").'),
)
# fmt: on


def collect_families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """Yields every family with its ``samples``, which may come in any order of families. All
    samples are read first; each family is built when it is yielded."""
    by_family: dict[str, list[Sample]] = {row.name: [] for row in FAMILIES}
    for sample in samples:
        by_family[sample[0]].append(sample)
    for row in FAMILIES:
        metric: Any = row.kind(row.name, row.help, labels=row.labels)
        for _, labels, value in by_family[row.name]:
            metric.add_metric(labels, *(value if isinstance(value, tuple) else (value,)))
        yield metric
