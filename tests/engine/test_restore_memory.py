"""Tests of a restored engine's memory: tables are mapped, not copied, on any number of ranks."""

from pathlib import Path

import torch
from forkserver import PYTHON, run_warm

from embedserve_store import TableSpec, publish

RESTORE_WITHIN = """
import re, resource, sys
from pathlib import Path
from typing import Any
from embedserve.engine.engine import Engine
from embedserve.engine.restore import restore
from embedserve_store import ModelStore

def own_bytes(kind):
    return 1024 * int(re.search(kind + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

version = ModelStore(sys.argv[1]).load("large")
assert version.manifest.nbytes == 513 << 20
limit = own_bytes("VmData") + (400 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for devices in ("auto", "cpu:1", "cpu:4"):
    before = own_bytes("RssAnon")
    engine = restore(version, devices)
    print(engine.plan.world_size, own_bytes("RssAnon") - before)
"""

RESTORE_S_MAX = 300


def test_restore_does_not_copy_tables_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    """Restores tables of 513 MiB on 2, 1 and 4 ranks in turn, in one process.

    All of it may add less than 400 MiB. A compiled lookup takes some 80 MB.
    """
    counts = {"rows": 1 << 20, "whole": 1 << 20, "copied": 1 << 12}
    publish(
        {f"embedding_bags.{name}.weight": torch.zeros(count, 64) for name, count in counts.items()},
        tmp_path,
        model="large",
        tables=[
            TableSpec(name, count, 64, (name,), "sum", "float32") for name, count in counts.items()
        ],
        sharding={"rows": "row_wise", "whole": "table_wise", "copied": "data_parallel"},
        world_size=2,
    )
    done = run_warm([*PYTHON, "-c", RESTORE_WITHIN, tmp_path], timeout=RESTORE_S_MAX)
    assert done.returncode == 0, done.stderr
    printed = (line.split() for line in done.stdout.splitlines())
    grown = {int(ranks): int(nbytes) for ranks, nbytes in printed}
    assert grown.keys() == {1, 2, 4}
    assert max(grown.values()) < 160 << 20
