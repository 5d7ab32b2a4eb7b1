"""Tables mapped from their file, brought into memory before anybody asks for them."""

from __future__ import annotations

import mmap
import os
from threading import Thread, get_native_id

import numpy as np
from numpy.typing import NDArray

from embedserve_store.model_version import ModelVersion

SHARE = 1 / 2
"""Of the memory that is available: what is larger is read as it is asked for."""
NICE = 10
"""A tenth of a core that others want all of."""


def touch(version: ModelVersion, available: int) -> None:
    """Has every page of the tables of ``version`` read and mapped, so that no lookup waits for
    one; nothing where they would take too much of ``available`` bytes.

    Read in a thread that gives way to others: it faults once for each page, and numpy holds no lock
    of the interpreter's meanwhile.
    """
    data = version.tables.data
    if 0 < data.nbytes <= SHARE * available:
        thread = Thread(target=_read, args=(data[:: mmap.PAGESIZE],), name="touch", daemon=True)
        thread.start()
        thread.join()


def _read(pages: NDArray[np.uint8]) -> None:
    os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)  # on Linux of this thread alone
    pages.max()
