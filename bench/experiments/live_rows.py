"""Times what rows and ids that change cost: writing a delta, and finding the rows of a batch.

8 tables of 100,000 rows of 64 float32, as the workloads have. No server and no kernel runs: the
figures are those of one process on one core.

    PYTHONPATH=bench .venv/bin/python bench/experiments/live_rows.py
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve_store import Manifest, ModelVersion, Plan, Shard, TablePlan, TableSpec
from embedserve_store.format.changed_ids import ChangedIds
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.tables_file import TablesFile, header_bytes
from embedserve_store.ids.id_map import IdMap

TABLES, ROWS, DIM = 8, 100_000, 64
IDS = 2_100
MEMORY = 1 << 30
ROUNDS = 2_000


def version_of(folder: Path) -> ModelVersion:
    names = [f"t{i}" for i in range(TABLES)]
    rule = IdRule("map", entries=ROWS)
    specs = tuple(TableSpec(name, ROWS, DIM, (name,), "sum", "float32", ids=rule) for name in names)
    path = folder / "tables.safetensors"
    with path.open("wb") as file:
        file.write(header_bytes(specs))
        file.truncate(file.tell() + sum(spec.nbytes for spec in specs))
    manifest = Manifest("bench", 1, specs, True, {})
    plans = {name: TablePlan("table_wise", (Shard(0, 0, ROWS, 0, DIM),)) for name in names}
    tables = TablesFile.open(path, specs)
    id_map = IdMap.build(np.arange(ROWS), np.arange(ROWS), "t")
    maps = dict.fromkeys(names, id_map)
    return ModelVersion(folder, manifest, Plan(1, plans, {}), tables, maps)


def changes(version: ModelVersion, random: np.random.Generator, rows: int) -> list[ChangedRows]:
    return [
        ChangedRows(
            spec,
            np.sort(random.choice(ROWS, rows, replace=False)),
            random.integers(0, 100, (rows, spec.row_bytes), np.uint8),
        )
        for spec in version.manifest.tables
    ]


def seconds(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def microseconds(call: Callable[[], object]) -> float:
    return 1e6 * statistics.median(seconds(call) for _ in range(ROUNDS))


def main() -> None:
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        version = version_of(Path(folder))
        live = LiveRows(version, MEMORY, readers=1, new_ids_percent=20)
        writer, reader = RowsWriter(live), RowsReader(live, 0, version.plan)
        ids = random.integers(0, ROWS, IDS)
        counts = np.full(TABLES, IDS // TABLES)
        counts[0] += IDS - counts.sum()

        def look_up() -> None:
            view, _ = reader.begin()
            reader.rows_in_view(ids, counts, view)
            reader.end(view)

        print(f"a batch of {IDS} ids takes longer by")
        for percent in (0, 1, 10):
            if percent:
                writer.apply(live.seq + 1, changes(version, random, ROWS * percent // 100))
            print(f"  {percent:2} % of rows changed: {microseconds(look_up):.1f} us")
        translator = version.translator

        def translate() -> None:
            view, _ = reader.begin()
            override_rows = partial(reader.override_rows, view)
            translator.translate(ids, counts, override_rows)
            reader.end(view)

        plain = microseconds(partial(translator.translate, ids, counts))
        print(f"translating them from {TABLES} vocabularies takes {plain:.1f} us, and longer by")
        for percent in (0, 1, 10):
            if percent:
                changed = np.sort(random.choice(ROWS, ROWS * percent // 100, replace=False))
                ids_changed = [
                    ChangedIds(spec, changed, random.integers(0, ROWS, len(changed)))
                    for spec in version.manifest.tables
                ]
                writer.apply(live.seq + 1, live.as_rows(ids_changed))
            print(f"  {percent:2} % of ids changed: {microseconds(translate) - plain:.1f} us")
        times = []
        for _ in range(30):
            change = changes(version, random, 10_000)
            times.append(1e3 * seconds(partial(writer.apply, live.seq + 1, change)))
        print(
            f"a delta of 10,000 rows in each of {TABLES} tables: "
            f"{statistics.median(times):.1f} ms, at most {max(times):.1f} ms"
        )


if __name__ == "__main__":
    main()
