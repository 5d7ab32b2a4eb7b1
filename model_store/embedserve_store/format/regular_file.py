"""Rejects paths that are not regular files, because opening them could block."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from embedserve_store.errors import StoreError


def stat_regular(path: Path) -> os.stat_result:
    """Returns the status of a regular file.

    Raises:
        StoreError: the path is not a regular file. Opening a named pipe, for example, would block.
        OSError: the path does not exist or cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path}: is no regular file")
    return status
