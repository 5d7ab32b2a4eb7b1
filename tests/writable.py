"""Write access to published files, which are read-only, for tests that damage them."""

import stat
from pathlib import Path


def writable(path: Path) -> Path:
    """Makes a file, or a folder and everything in it, writable by its owner; returns the path."""
    for one in (path, *path.rglob("*")):
        one.chmod(one.stat().st_mode | stat.S_IWUSR)
    return path
