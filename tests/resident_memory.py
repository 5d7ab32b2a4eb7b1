"""Memory of the process that runs the tests."""

import mmap
from pathlib import Path


def resident_bytes() -> int:
    """Returns the bytes of this process that are in memory, files that it has mapped included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
