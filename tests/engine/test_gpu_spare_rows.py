"""Tests, without a GPU, of the spare rows for changes on a GPU."""

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.row_groups import BYTES_PER_SPARE, RowGroup
from embedserve.engine import gpu_spare_rows
from embedserve.engine.gpu_spare_rows import changed_bytes_max, pitch_of
from embedserve_store import StoreError
from embedserve_store.format.table_spec import DTYPES, TableSpec

PAGE = 2 << 20


def live_of(tables: list[TableSpec], memory_max: int, first_row: int = 5000) -> LiveRows:
    groups = [RowGroup((one,), 0, one.num_embeddings, 1, 0, first_row) for one in tables]
    version = SimpleNamespace(path="store/m/1")
    live: Any = SimpleNamespace(table_groups=groups, memory_max=memory_max, version=version)
    return cast(LiveRows, live)


@pytest.mark.parametrize("seed", range(200))
def test_reserved_pages_suffice_for_any_distribution_of_rows(seed: int) -> None:
    random = Random(seed)
    tables = [
        TableSpec(str(i), 1 << 30, random.randint(1, 300), (f"f{i}",), "sum", random.choice(DTYPES))
        for i in range(random.randint(1, 5))
    ]
    memory = left = random.randint(1, 64 * PAGE)
    pages = 0
    for table in tables:
        most = left // (table.row_bytes + BYTES_PER_SPARE)
        rows = random.randint(0, most) if table is not tables[-1] else most
        left -= rows * (table.row_bytes + BYTES_PER_SPARE)
        # The first row may begin anywhere in a page.
        begin = random.randrange(PAGE) if rows else 0
        pages += -(-(begin + rows * pitch_of(table)) // PAGE)
    assert pages * PAGE <= changed_bytes_max(live_of(tables, memory), PAGE) + PAGE - 1


def test_row_numbers_above_the_int32_limit_are_rejected() -> None:
    table = TableSpec("wide", 2**31 - 10_000, 4, ("f",), "sum", "float32")
    live = live_of([table], 1 << 30, first_row=2**31)
    with pytest.raises(StoreError, match="table 'wide': 2147473648 rows, and room for 0 changed"):
        gpu_spare_rows.GpuSpareRows(live, torch.device("cpu"))


def test_changed_rows_that_exceed_free_gpu_memory_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = TableSpec("t", 1_000_000, 64, ("f",), "sum", "float32")
    live = live_of([table], 1 << 30)
    needed = 123 * PAGE + changed_bytes_max(live, PAGE) + (512 << 20)
    device = torch.device("cuda", 0)

    def free(nbytes: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (nbytes, 0))
        gpu_spare_rows._check_room(live, device, PAGE)

    free(needed)
    with pytest.raises(
        StoreError,
        match=f"store/m/1: 257,949,696 bytes of tables and {changed_bytes_max(live, PAGE):,} for "
        f"changed rows do not fit on cuda:0, which has {needed - 1:,} free",
    ):
        free(needed - 1)
