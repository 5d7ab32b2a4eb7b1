"""What opening a path might wait for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from embedserve_store.errors import StoreError


def stat_regular(path: Path) -> os.stat_result:
    """The status of a regular file.

    Raises:
        StoreError: it is none. A named pipe, say, would be waited for.
        OSError: there is none.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path}: is no regular file")
    return status
