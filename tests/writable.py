"""Published files are read-only: what a test damages, it makes writable first."""

from __future__ import annotations

import stat
from pathlib import Path


def writable(path: Path) -> Path:
    """A file, or a folder and all in it, that its owner may write to from now on."""
    for one in (path, *path.rglob("*")):
        one.chmod(one.stat().st_mode | stat.S_IWUSR)
    return path
