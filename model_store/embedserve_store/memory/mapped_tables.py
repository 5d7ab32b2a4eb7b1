"""Tables mapped from their file, brought into memory before anybody asks for them."""

from __future__ import annotations

import mmap

from embedserve_store.model_version import ModelVersion

SHARE = 1 / 2
"""Of the memory that is available: what is larger is read as it is asked for."""


def touch(version: ModelVersion, available: int) -> None:
    """Has every page of the tables of ``version`` read and mapped, so that no lookup waits for
    one; nothing where they would take too much of ``available`` bytes.

    Other threads run meanwhile: numpy holds no lock of the interpreter's as it reads.
    """
    data = version.tables.data
    if 0 < data.nbytes <= SHARE * available:
        data[:: mmap.PAGESIZE].max()
