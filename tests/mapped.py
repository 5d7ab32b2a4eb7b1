"""Tables mapped from a file, and the amount of a file that this process has mapped."""

import mmap
import re
from pathlib import Path

import numpy as np

from embedserve_store.format.tables_file import FileState, TablesFile


def map_tables(path: Path, nbytes: int, start: int = 0) -> TablesFile:
    """Maps ``nbytes`` zeros from byte ``start`` of ``path`` as a TablesFile without tables."""
    path.write_bytes(bytes(start + nbytes))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapping, np.uint8, nbytes, offset=start)
    return TablesFile(path, data, {}, {}, FileState.of(path))


def mapped_kb(path: Path) -> int:
    """Returns the resident size of this process's mapping of ``path``, in kB."""
    maps = Path("/proc/self/smaps").read_text()
    of_file = maps[maps.index(str(path)) :]
    found = re.search(r"Rss: +(\d+) kB", of_file)
    assert found
    return int(found[1])
