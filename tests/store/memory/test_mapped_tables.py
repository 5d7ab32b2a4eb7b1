"""Tables are brought into memory, by a thread that gives way."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embedserve_store.memory.mapped_tables import NICE, touch


class Data:
    """An array that tells who reads its pages, and which."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.niced: list[int] = []

    def __getitem__(self, pages: slice) -> Data:
        assert (pages.start, pages.stop, pages.step) == (None, None, 4096)
        return self

    def max(self) -> int:
        self.niced.append(os.getpriority(os.PRIO_PROCESS, 0))
        return 0


def version_of(data: Any) -> Any:
    return SimpleNamespace(tables=SimpleNamespace(data=data))


@pytest.mark.parametrize(("nbytes", "is_read"), [(1000, True), (1001, False), (0, False)])
def test_what_fits_is_read_by_a_thread_that_gives_way(nbytes: int, is_read: bool) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    data = Data(nbytes)
    touch(version_of(data), 2000)
    assert data.niced == [NICE] * is_read
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_pages_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(100 * 4096))
    data = np.memmap(tmp_path / "rows", np.uint8, "r")
    touch(version_of(data), 1 << 40)
    maps = Path("/proc/self/smaps").read_text()
    of_file = maps[maps.index(str(tmp_path / "rows")) :]
    assert "Rss:                 400 kB" in of_file.split("VmFlags")[0]
