"""Tables are brought into memory."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embedserve_store.memory.mapped_tables import PIECE_BYTES, populate

SIZE = 2 * PIECE_BYTES + 100 * mmap.PAGESIZE


def rows_of(path: Path, start: int = 0) -> NDArray[np.uint8]:
    path.write_bytes(bytes(SIZE + start))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, np.uint8, SIZE, offset=start)


def version_of(data: Any) -> Any:
    return SimpleNamespace(tables=SimpleNamespace(data=data))


def mapped_kb(path: Path) -> int:
    maps = Path("/proc/self/smaps").read_text()
    of_file = maps[maps.index(str(path)) :]
    found = re.search(r"Rss: +(\d+) kB", of_file)
    assert found
    return int(found[1])


@pytest.mark.parametrize("start", [0, 16], ids=["by the kernel", "as before Linux 5.14"])
def test_pages_are_mapped(tmp_path: Path, start: int) -> None:
    """The kernel refuses what starts within a page, as an older one refuses all."""
    data = rows_of(tmp_path / "rows", start)
    assert mapped_kb(tmp_path / "rows") == 0
    populate(version_of(data), 2 * SIZE)
    assert mapped_kb(tmp_path / "rows") >= SIZE // 1024


def test_what_does_not_fit_is_not_read(tmp_path: Path) -> None:
    data = rows_of(tmp_path / "rows")
    populate(version_of(data), 2 * SIZE - 1)
    assert mapped_kb(tmp_path / "rows") == 0


def test_no_tables() -> None:
    populate(version_of(np.empty(0, np.uint8)), 1 << 30)
