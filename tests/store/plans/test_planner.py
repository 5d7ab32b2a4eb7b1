"""Tests of the planner: a plan fits into the ranks' real memory, and uses only sharding that can be
served."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server.python import run_python
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.plan import Plan
from embedserve_store.plans.planner import check_table_names, make_plan, to_torchrec
from embedserve_store.plans.sharding_types import SHARDING_TYPES, UNPOOLED_SHARDING_TYPES

GIB = 1 << 30
TIMEOUT_S = 300


def table(name: str, num_embeddings: int, dtype: str = "float32", dim: int = 128) -> TableSpec:
    return TableSpec(name, num_embeddings, dim, (name,), "sum", dtype)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("sharding", SHARDING_TYPES)
@pytest.mark.parametrize(("dtype", "stored_bytes"), [("float32", 143 * GIB), ("int4", 63 * GIB)])
def test_tables_larger_than_torchrecs_default_host_are_planned(
    monkeypatch: pytest.MonkeyPatch, device_type: str, sharding: str, dtype: str, stored_bytes: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    rows = stored_bytes // table("t", 1, dtype).row_bytes
    tables = (table("t", rows, dtype),)
    plan = make_plan(tables, sharding=sharding, world_size=1, device_type=device_type)
    plan.check(tables, "here")
    assert plan.bytes_per_rank(tables) == [tables[0].nbytes]


def test_planner_counts_the_memory_of_all_hosts() -> None:
    """Each host has about half of every table, so that a rank may have one whole."""
    tables = (table("a", 1000), table("b", 1000))
    memory_bytes = tables[0].nbytes * 3 // 4
    plan = make_plan(
        tables, sharding="auto", world_size=2, hosts=2, device_memory_bytes=memory_bytes
    )
    assert {one.sharding_type for one in plan.tables.values()} == {"table_wise"}


def test_hints_of_the_planner_are_logged_only_to_callers_of_torchrec(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Publishing runs in the process of the training, which may use the planner, too."""
    with caplog.at_level(logging.WARNING, "torchrec.distributed.planner"):
        make_plan((table("t", 1000),), sharding="auto", world_size=2)
        assert caplog.messages == []
        Topology(world_size=2, compute_device="cpu")
    assert "The topology was constructed directly" in caplog.text


def gpus(monkeypatch: pytest.MonkeyPatch, *memory_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(memory_bytes))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda rank: SimpleNamespace(total_memory=memory_bytes[rank]),
    )


def test_gpu_memory_limit_applies_to_padded_stored_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = (table("t", 1000, "int4"),)  # bytes a row: 68 stored, 80 on a GPU, 512 in float32
    gpus(monkeypatch, 40_000, 40_000)
    plan = make_plan(tables, sharding="row_wise", world_size=2, device_type="cuda")
    assert plan.bytes_per_rank(tables, "cuda") == [40_000, 40_000]
    gpus(monkeypatch, 40_000, 39_999)
    message = r"^rank 1 would hold 40,000 bytes of tables, it has 39,999: use more ranks"
    with pytest.raises(InvalidModelError, match=message):
        make_plan(tables, sharding="row_wise", world_size=2, device_type="cuda")


def test_only_present_gpus_limit_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = (table("t", 1000),)
    gpus(monkeypatch, 256_000)
    make_plan(tables, sharding="row_wise", world_size=2, device_type="cuda")
    gpus(monkeypatch, 1)
    make_plan(tables, sharding="row_wise", world_size=2, device_type="cpu")


def test_table_wise_tables_are_spread_over_ranks() -> None:
    tables = tuple(table(f"t{i}", 1000 * (i + 1)) for i in range(4))
    plan = make_plan(tables, sharding="table_wise", world_size=4)
    assert sorted(plan.bytes_per_rank(tables)) == [t.nbytes for t in tables]


def test_tables_exceeding_default_gpu_memory_are_placed_like_small_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch)

    def ranks(largest_rows: int) -> list[int]:
        rows = (largest_rows, largest_rows - 1, 1000)
        tables = tuple(table(f"t{i}", n, "int4") for i, n in enumerate(rows))
        plan = make_plan(tables, sharding="table_wise", world_size=2, device_type="cuda")
        return [plan.tables[t.name].shards[0].rank for t in tables]

    assert ranks(63 * GIB // 68) == ranks(2000)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_unconstrained_table_gets_a_servable_plan(
    monkeypatch: pytest.MonkeyPatch, device_type: str
) -> None:
    gpus(monkeypatch)
    tables = (table("t", 10**6, dim=1024),)
    plan = make_plan(tables, sharding="auto", world_size=4, device_type=device_type)
    plan.check(tables, "here")
    assert plan.constraints == {}


def test_planner_error_is_one_line() -> None:
    with pytest.raises(InvalidModelError, match=r"world_size is 2: .*insufficient") as e:
        make_plan((table("t", 1 << 53),), sharding="table_wise", world_size=2)
    assert "\n" not in str(e.value)


def kinds(plan: Plan) -> dict[str, str]:
    return {name: one.sharding_type for name, one in plan.tables.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("sharding", SHARDING_TYPES)
def test_every_sharding_type_is_planned_and_replanned(sharding: str, world_size: int) -> None:
    tables = tuple(
        table(dtype, 1001, dtype, dim=24) for dtype in ("float32", "float16", "int8", "int4")
    )
    plan = make_plan(tables, sharding=sharding, world_size=world_size)
    again = make_plan(tables, sharding="auto", world_size=3, constraints=plan.constraints)
    for one in (plan, again):
        one.check(tables, "here")
        assert set(kinds(one).values()) == {sharding}
    columns = [shard.col_count for shard in again.tables["int4"].shards]
    assert columns == ([8, 8, 8] if sharding == "column_wise" else [24] * len(columns))


@pytest.mark.parametrize("sharding", [*UNPOOLED_SHARDING_TYPES, "auto"])
def test_unpooled_tables_are_planned(sharding: str) -> None:
    tables = (TableSpec("t", 101, 8, ("t",), "none", "int8"),)
    for device_type in ("cpu", "cuda"):
        plan = make_plan(tables, sharding=sharding, world_size=2, device_type=device_type)
        plan.check(tables, "here")
    with pytest.raises(InvalidModelError, match="table 't': column_wise is for pooled tables"):
        make_plan(tables, sharding="column_wise", world_size=2)


def test_auto_divides_a_table_that_fits_no_rank() -> None:
    tables = (table("large", 10_000), table("small", 10))
    large_bytes = tables[0].nbytes
    roomy = make_plan(tables, sharding="auto", world_size=2, device_memory_bytes=large_bytes * 2)
    assert set(kinds(roomy).values()) == {"table_wise"}
    limit_bytes = large_bytes // 2 + tables[1].nbytes
    tight = make_plan(tables, sharding="auto", world_size=2, device_memory_bytes=limit_bytes)
    assert kinds(tight)["large"] == "row_wise"
    assert max(tight.bytes_per_rank(tables)) <= limit_bytes


def test_memory_limit_counts_stored_bytes_without_optimizer_state() -> None:
    tables = (table("t", 1000, "int8"),)
    fits = make_plan(
        tables, sharding="table_wise", world_size=1, device_memory_bytes=tables[0].nbytes
    )
    assert fits.bytes_per_rank(tables) == [132_000]
    message = "rank 0 would hold 132,000 bytes of tables, it has 131,999: use more ranks, row_wise"
    with pytest.raises(InvalidModelError, match=message):
        make_plan(tables, sharding="table_wise", world_size=1, device_memory_bytes=131_999)


def test_plan_that_need_not_fit_exceeds_the_memory_limit() -> None:
    tables = (table("a", 1000), table("b", 1000))
    plan = make_plan(
        tables, sharding="table_wise", world_size=2, device_memory_bytes=1, must_fit=False
    )
    assert plan.bytes_per_rank(tables) == [tables[0].nbytes] * 2


def test_tables_are_packed_by_bytes_if_the_cheapest_plan_does_not_fit() -> None:
    """On the rank without the busy table, c fills 7 of 8 units. The last table of two units then
    fits nowhere."""
    sizes = {"a": 4, "b": 3, "c": 3, "d": 2, "e": 2, "f": 2}
    tables = tuple(table(name, rows * 1000) for name, rows in sizes.items())
    unit = tables[0].nbytes // 4
    busy = {"b": {"pooling_factors": [1000.0]}}
    wanted: dict[str, Any] = {"sharding": "table_wise", "world_size": 2, "constraints": busy}
    loose = make_plan(tables, **wanted)
    assert max(loose.bytes_per_rank(tables)) > 8 * unit
    tight = make_plan(tables, device_memory_bytes=8 * unit, **wanted)
    assert tight.bytes_per_rank(tables) == [8 * unit, 8 * unit]


def test_data_parallel_copies_count_toward_each_ranks_memory() -> None:
    tables = (table("copied", 1000), table("whole", 1000))
    sharding = {"copied": "data_parallel", "whole": "table_wise"}
    both_bytes = tables[0].nbytes + tables[1].nbytes
    plan = make_plan(tables, sharding=sharding, world_size=2, device_memory_bytes=both_bytes)
    assert sorted(plan.bytes_per_rank(tables)) == [tables[0].nbytes, both_bytes]
    with pytest.raises(InvalidModelError, match=f"would hold {both_bytes:,} bytes"):
        make_plan(tables, sharding=sharding, world_size=2, device_memory_bytes=both_bytes - 1)


def test_auto_uses_column_wise_only_on_cuda_and_only_for_wide_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch)
    tables = (table("wide", 10**6, dim=1024), table("narrow", 10**6, dim=128))
    on_gpus = make_plan(tables, sharding="auto", world_size=4, device_type="cuda")
    assert kinds(on_gpus)["wide"] == "column_wise" != kinds(on_gpus)["narrow"]
    assert len(on_gpus.tables["wide"].shards) > 1
    on_cpu = make_plan(tables, sharding="auto", world_size=4, constraints=on_gpus.constraints)
    assert "column_wise" not in kinds(on_cpu).values()


def test_plan_does_not_depend_on_the_process_hash_seed() -> None:
    """Compares this process with another, which orders sets and dicts of strings differently."""
    code = (
        "from embedserve_store.format.table_spec import TableSpec\n"
        "from embedserve_store.plans.planner import make_plan\n"
        "tables = [TableSpec(n, 999, 64, (n,), 'sum', 'int8') for n in 'abcd']\n"
        "print(hash('a'), make_plan(tables, sharding='auto', world_size=3).to_json())\n"
    )
    done = run_python("-c", code, timeout_s=TIMEOUT_S)
    order, _, plan = done.stdout.partition(" ")
    assert int(order) != hash("a"), done.stderr
    tables = tuple(TableSpec(name, 999, 64, (name,), "sum", "int8") for name in "abcd")
    assert plan == f"{make_plan(tables, sharding='auto', world_size=3).to_json()}\n"


def test_tables_with_long_bags_are_spread_over_ranks() -> None:
    """All tables have the same size. The two tables with long bags must be on different ranks."""
    tables = tuple(table(name, 1000) for name in "abcd")
    long = {"pooling_factors": [500.0]}
    plan = make_plan(
        tables, sharding="table_wise", world_size=2, constraints={"a": long, "c": long}
    )
    rank = {name: one.shards[0].rank for name, one in plan.tables.items()}
    assert rank["a"] != rank["c"]


def test_given_plan_is_validated_and_used_unchanged() -> None:
    tables = (table("t", 100),)
    plan = make_plan(tables, sharding="row_wise", world_size=2)
    assert make_plan(tables, sharding=plan) is plan
    assert make_plan(tables, sharding=plan, world_size=2) is plan
    with pytest.raises(InvalidModelError, match="world_size is 3, but the plan is for 2 ranks"):
        make_plan(tables, sharding=plan, world_size=3)
    with pytest.raises(InvalidModelError, match="plan: t: shards cover 100 of 101 rows"):
        make_plan((table("t", 101),), sharding=plan)
    with pytest.raises(InvalidModelError, match="a plan has its own constraints"):
        make_plan(tables, sharding=plan, constraints={"t": TableConstraints()})
    with pytest.raises(InvalidModelError, match="rank 0 would hold 25,600 bytes"):
        make_plan(tables, sharding=plan, device_memory_bytes=25_599)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "table_wise"])
def test_table_with_one_shard_is_table_wise_for_torchrec(device_type: str, kind: str) -> None:
    """A whole table needs no reduction over ranks, for which FBGEMM asks NVML how the GPUs are
    linked."""
    tables = (table("t", 100),)
    plan = make_plan(tables, sharding=kind, world_size=1, device_type=device_type)
    given = to_torchrec(plan, device_type)
    assert plan.tables["t"].sharding_type == kind
    assert (given["t"].sharding_type, given["t"].ranks) == ("table_wise", [0])


def test_data_parallel_table_is_table_wise_on_rank_0_for_torchrec() -> None:
    tables = (table("t", 100), table("one", 100))
    sharding = {"t": "data_parallel", "one": "column_wise"}
    plan = make_plan(
        tables, sharding=sharding, world_size=3, constraints={"one": {"min_partition": 128}}
    )
    given = to_torchrec(plan, "cuda")
    assert (given["t"].sharding_type, given["t"].ranks) == ("table_wise", [0])
    (placement,) = [shard.placement for shard in given["t"].sharding_spec.shards]
    assert str(placement) == "rank:0/cuda:0"
    assert (given["one"].sharding_type, len(given["one"].ranks)) == ("table_wise", 1)


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel", "auto"])
@pytest.mark.parametrize("name", ["a.b", "type", "keys", "float", "update", "training"])
def test_table_name_that_torch_modules_cannot_hold_is_rejected(name: str, sharding: str) -> None:
    tables = (table("t", 100), table(name, 100))
    with pytest.raises(InvalidModelError, match=f"^table {name!r}: torch's modules cannot hold a"):
        make_plan(tables, sharding=sharding)


@pytest.mark.parametrize("name", ["a.b", "t", "1", "a-b", "weight", *dir(torch.nn.ModuleDict())])
def test_rejected_table_names_are_those_that_torchrec_rejects(name: str) -> None:
    config = EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4, feature_names=["f"])
    try:
        EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    except KeyError:
        with pytest.raises(InvalidModelError, match="cannot hold a table of this name"):
            check_table_names([table(name, 10)])
    else:
        check_table_names([table(name, 10)])
