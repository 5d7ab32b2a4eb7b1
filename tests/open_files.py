"""Which files this process has open.

Of all its descriptors a test can say nothing: what tests before it left to the garbage collector is
closed meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """The files of ``folder`` that are open, removed ones too; once for each descriptor."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself, and what was closed
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(file for file in files if file.startswith(f"{folder}/"))
