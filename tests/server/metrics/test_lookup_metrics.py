"""Tests of the metrics of rows read per table and rank: they equal a count by hand, for every
plan."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.fake_engine import Bags, make_request
from server.fake_models import served_of
from server.metrics.metric_samples import families_of, workers_of

from embedserve.batching.join import adapt_to_model, join
from embedserve.lookup_types import Batch
from embedserve.metrics import request_metrics
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.model_metrics import COLUMNS_MIN, name_cells
from embedserve.metrics.request_metrics import LookupMetrics
from embedserve.metrics.row_to_rank import DIVIDED_CELLS, ROWS_SAMPLED_MAX
from embedserve.metrics.shared_counters import WorkerCounters, single_worker_counters
from embedserve.model_info import ModelInfo
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.plans.access_counts import reads_per_rank
from embedserve_store.plans.plan import Plan, Shard, TablePlan

SKIP = IdRule(unknown="skip")
TABLES = (
    TableSpec("rows", 10, 8, ("x", "y"), "sum", "float32", ids=SKIP),
    TableSpec("again", 12, 4, ("x",), "sum", "float16", ids=SKIP),
    TableSpec("whole", 40, 8, ("z",), "sum", "float32"),
    TableSpec("columns", 5, 24, ("v", "w"), "sum", "int8"),
    TableSpec("copied", 4, 4, ("u",), "sum", "float16"),
    TableSpec("few", 2, 4, ("few",), "mean", "int4"),
)
"""Two tables serve x. The tables rows and columns serve two features each."""
PLAN = Plan(
    3,
    {
        "rows": TablePlan(
            "row_wise", (Shard(0, 0, 6, 0, 8), Shard(1, 6, 3, 0, 8), Shard(2, 9, 1, 0, 8))
        ),
        "again": TablePlan(
            "row_wise", (Shard(0, 0, 2, 0, 4), Shard(1, 2, 5, 0, 4), Shard(2, 7, 5, 0, 4))
        ),
        "whole": TablePlan("table_wise", (Shard(1, 0, 40, 0, 8),)),
        "columns": TablePlan("column_wise", (Shard(0, 0, 5, 0, 8), Shard(2, 0, 5, 8, 16))),
        "copied": TablePlan("data_parallel", tuple(Shard(rank, 0, 4, 0, 4) for rank in range(3))),
        "few": TablePlan(
            "row_wise", (Shard(0, 0, 1, 0, 4), Shard(1, 1, 1, 0, 4), Shard(2, 2, 0, 0, 4))
        ),
    },
    {},
)
ROW_BYTES = {"rows": 32, "again": 8, "whole": 32, "columns": (8 + 4) + (16 + 4), "copied": 8}
ROW_BYTES |= {"few": 2 + 4}
PREFIX = "embedserve_"


def model_of(tables: tuple[TableSpec, ...] = TABLES, plan: Plan = PLAN) -> ModelInfo:
    manifest = Manifest("shop", 7, tables, is_weighted=False)
    return served_of(manifest, IdTranslator(manifest, {}), plan)


MODEL = model_of()
ROWS = {"x": 10, "y": 10, "z": 40, "v": 5, "w": 5, "u": 4, "few": 2}
"""Number of ids with a row in all tables of each feature. A larger id is skipped if the rule says
so."""


def joined(*all_bags: Bags, model: ModelInfo = MODEL) -> Batch:
    batch = join([adapt_to_model(make_request(bags), model) for bags in all_bags], model)
    assert batch is not None
    return batch


def counted_by_hand(*all_bags: Bags) -> dict[str, Counter[str]]:
    """Returns each family's counts per feature, table, rank, or table and rank; counts ids one by
    one."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in FAMILIES}
    for feature, one in ((f, i) for bags in all_bags for f in bags for bag in bags[f] for i in bag):
        counts["feature_ids"][feature] += 1
        for table in TABLES:
            if feature not in table.feature_names or one >= ROWS[feature]:
                continue
            plan = PLAN.tables[table.name]
            shards = plan.shards[:1] if plan.sharding_type == "data_parallel" else plan.shards
            counts["table_lookups"][table.name] += 1
            counts["table_read_bytes"][table.name] += ROW_BYTES[table.name]
            for shard in shards:
                if not shard.row_offset <= one < shard.row_offset + shard.row_count:
                    continue
                column_share = shard.col_count / table.embedding_dim
                nbytes = (
                    {8: 12, 16: 20}[shard.col_count] if column_share < 1 else ROW_BYTES[table.name]
                )
                counts["rank_lookups"][str(shard.rank)] += 1
                counts["rank_read_bytes"][str(shard.rank)] += nbytes
                if plan.sharding_type == "row_wise":
                    counts["row_wise_lookups"][f"{table.name} {shard.rank}"] += 1
    return counts


FAMILIES = {
    "feature_ids": ("feature",),
    "table_lookups": ("table",),
    "table_read_bytes": ("table",),
    "rank_lookups": ("rank",),
    "rank_read_bytes": ("rank",),
    "row_wise_lookups": ("table", "rank"),
}


def exported(metrics: Metrics) -> dict[str, Counter[str]]:
    families = families_of(metrics)
    counts = {}
    for name, labels in FAMILIES.items():
        counts[name] = Counter(
            {
                " ".join(sample.labels[label] for label in labels): sample.value
                for sample in families[PREFIX + name].samples
            }
        )
    return counts


BAGS: Bags = {
    "x": [[0, 9, 9], [2]],
    "y": [[5, 6], []],
    "z": [[39], [0, 1]],
    "v": [[4], [4]],
    "w": [[], [0]],
    "u": [[3], [3]],
    "few": [[1], [0, 1]],
}


def test_counts_of_one_batch_equal_a_count_by_hand() -> None:
    metrics = Metrics([MODEL])
    other: Bags = {"x": [[7, 11]], "few": [[1]]}  # 11 is no row of rows: left out
    metrics.models["shop"].version.lookups.observe(joined(BAGS, other))
    counted = exported(metrics)
    assert counted == counted_by_hand(BAGS, other)
    assert counted["rank_lookups"]["0"] == 3 + 1 + 3 + 2 + 1  # rows, again, columns, copied, few
    assert counted["feature_ids"]["x"] == 6
    assert counted["table_lookups"]["rows"] == 5 + 2


requests = st.fixed_dictionaries(
    {
        feature: st.lists(st.lists(st.integers(0, rows - 1), max_size=6), min_size=2, max_size=2)
        for feature, rows in ROWS.items()
    }
)


@given(batches=st.lists(st.lists(requests, min_size=1, max_size=3), min_size=1, max_size=3))
def test_counts_are_exact_if_every_batch_is_sampled(batches: list[list[Bags]]) -> None:
    slot = single_worker_counters(name_cells(COLUMNS_MIN))
    lookups = LookupMetrics(MODEL, slot, COLUMNS_MIN, sampling_share=np.inf)
    for i, requests in enumerate(batches):
        lookups.observe(joined(*requests))
        if i:
            lookups.flush()
    lookups.flush()
    reads = lookups.reads()
    expected = counted_by_hand(*(bags for requests in batches for bags in requests))
    assert {t: n for t, n in reads.by_table.items() if n} == expected["table_lookups"]
    per_rank = [
        {str(rank): n for rank, n in enumerate(counts) if n}
        for counts in reads_per_rank(PLAN, TABLES, reads)
    ]
    assert per_rank[0] == pytest.approx(expected["rank_lookups"])
    assert per_rank[1] == pytest.approx(expected["rank_read_bytes"])


def test_counts_are_summed_over_workers_including_replaced_workers() -> None:
    slots, _ = workers_of(2, MODEL)
    for worker in (0, 1, 1):
        metrics = Metrics([MODEL], WorkerCounters(slots, worker))
        metrics.models["shop"].version.lookups.observe(joined(BAGS))
        metrics.flush()
    scraped_worker = Metrics([MODEL], WorkerCounters(slots, 0))
    assert exported(scraped_worker) == counted_by_hand(BAGS, BAGS, BAGS)


def test_replaced_worker_divides_reads_that_its_predecessor_left() -> None:
    slots, (killed,) = workers_of(1, MODEL)
    killed.models["shop"].version.lookups.observe(joined(BAGS))  # it never flushes
    metrics = Metrics([MODEL], WorkerCounters(slots, 0))
    metrics.models["shop"].version.lookups.observe(joined(BAGS))
    metrics.flush()
    assert exported(metrics) == counted_by_hand(BAGS, BAGS)


def test_row_wise_lookups_add_up_to_sampled_table_lookups() -> None:
    """Checks the sum for any choice of sampled batches, and that no counter decreases."""
    random = np.random.default_rng(0)
    metrics = Metrics([MODEL])
    lookups = metrics.models["shop"].version.lookups
    before: Counter[str] = Counter()
    for _ in range(40):
        for _ in range(5):
            ids = np.minimum(random.zipf(1.3, 300) - 1, 9).tolist()
            lookups.observe(joined({"x": [ids], "y": [ids[:50]]}))
        now = exported(metrics)["row_wise_lookups"]
        assert all(now[key] >= count for key, count in before.items())
        before = now
    read = exported(metrics)["table_lookups"]
    for table in ("rows", "again"):
        divided = sum(n for key, n in before.items() if key.startswith(f"{table} "))
        # The rest is added with the next sampled batch.
        assert 0 < divided <= read[table] * (1 + 1e-9)


def test_interrupted_sample_is_followed_by_another_within_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([10.0, 10.5, 12.5, 12.6])
    monkeypatch.setattr(request_metrics, "perf_counter", lambda: next(times))
    lookups = LookupMetrics(MODEL, single_worker_counters(name_cells(COLUMNS_MIN)), COLUMNS_MIN)
    lookups.observe(joined({"few": [[0]]}))  # takes half a second
    lookups.observe(joined({"x": [[0]]}))
    lookups.flush()
    assert sum(lookups.reads().by_rank["rows"]) == 1


def test_large_batch_is_sampled_evenly() -> None:
    """Checks that ROWS_SAMPLED_MAX rows are sampled, evenly from the whole batch."""
    metrics = Metrics([MODEL])
    ids = np.repeat(np.arange(10), 5 * ROWS_SAMPLED_MAX)
    metrics.models["shop"].version.lookups.observe(joined({"y": [ids.tolist()]}))
    counted = exported(metrics)["row_wise_lookups"]
    shares = [counted[f"rows {rank}"] / ids.size for rank in range(3)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.001)
    assert sum(shares) == pytest.approx(1)


def test_row_wise_lookups_cover_only_the_first_tables_beyond_the_limit() -> None:
    ranks = DIVIDED_CELLS // 2
    names = ("a", "b", "c")
    tables = tuple(TableSpec(name, ranks, 4, (name,), "sum", "float32") for name in names)
    shards = tuple(Shard(rank, rank, 1, 0, 4) for rank in range(ranks))
    plan = Plan(ranks, {name: TablePlan("row_wise", shards) for name in names}, {})
    model = model_of(tables, plan)
    metrics = Metrics([model])
    bags: Bags = {name: [[ranks - 1]] for name in names}
    metrics.models["shop"].version.lookups.observe(joined(bags, model=model))
    counted = exported(metrics)
    assert counted["table_lookups"] == {"a": 1, "b": 1, "c": 1}
    assert +counted["row_wise_lookups"] == {f"a {ranks - 1}": 1, f"b {ranks - 1}": 1}


def test_next_version_counts_from_zero() -> None:
    metrics = Metrics([MODEL])
    shop = metrics.models["shop"]
    before = shop.version
    before.lookups.observe(joined(BAGS))
    metrics.flush()
    manifest = Manifest("shop", 8, TABLES, is_weighted=False)
    shop.switch(served_of(manifest, IdTranslator(manifest, {}), PLAN), 0.1)
    before.lookups.observe(joined(BAGS))  # a batch that was in flight
    before.flush()
    assert exported(metrics)["feature_ids"].total() == 0
    shop.version.lookups.observe(joined(BAGS))
    assert exported(metrics) == counted_by_hand(BAGS)
