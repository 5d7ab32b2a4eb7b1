"""Tests of the memory of a publish, which holds blocks of a table, never a whole one."""

import json
from pathlib import Path

import pytest
from server.python import run_python

ROWS, DIM = 700_000, 128
TABLE_BYTES = 4 * ROWS * DIM

PUBLISH = """
import resource, sys
from pathlib import Path
from embedserve_store import TableSpec, publish

def described(rows, dtype):
    return [TableSpec("t", rows, 128, ("t",), "sum", dtype)]

store = Path(sys.argv[1]) / "store"
small, large = Path(sys.argv[1]) / "small.safetensors", Path(sys.argv[1]) / "large.safetensors"
publish(small, store, model="small", tables=described(8, "int4"))  # imports, starts threads
lines = Path("/proc/self/status").read_text().splitlines()
data = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + (64 << 20), resource.RLIM_INFINITY))
for dtype in ("float16", "int4"):
    publish(large, store, model=dtype, tables=described(int(sys.argv[2]), dtype))
"""


def write_zeros(path: Path, rows: int) -> None:
    """Writes a checkpoint whose rows are a hole in the file."""
    entry = {"dtype": "F32", "shape": [rows, DIM], "data_offsets": [0, 4 * rows * DIM]}
    header = json.dumps({"ebc.embedding_bags.t.weight": entry}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + 4 * rows * DIM)


def test_table_of_350_mb_is_published_with_64_mib_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_zeros(tmp_path / "small.safetensors", 8)
    write_zeros(tmp_path / "large.safetensors", ROWS)
    # Else glibc keeps blocks that threads have freed, more or less with the load of the host.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    done = run_python("-c", PUBLISH, tmp_path, str(ROWS), timeout_s=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for dtype in ("float16", "int4"):
        assert (tmp_path / "store" / dtype / "1" / "manifest.json").exists()
