"""Which files of a folder this process has open.

Tests cannot check all descriptors of the process: the garbage collector may close those of earlier
tests at any time.
"""

import contextlib
import os
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """Returns the open files below ``folder``, including removed ones; one entry per descriptor."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or one just closed
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(file for file in files if file.startswith(f"{folder}/"))
