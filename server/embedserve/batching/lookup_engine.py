"""Interface of an engine, as the batcher uses it."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class LookupEngine(Protocol):
    """One restored version of a model; engine/engine.py has the implementation.

    Attributes:
        waits_for_device: whether another device runs the lookups while the calling thread waits.
            Such lookups never run on the event loop's thread and are not split into chunks. The
            device receives the next lookup before it has finished the last.
        replicas: number of copies of the rows, each on its own device. Replicas look batches up
            concurrently. 1 for an engine that waits for no device.
    """

    waits_for_device: bool
    replicas: int

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray: ...

    def to_float16(self, values: np.ndarray) -> np.ndarray: ...

    def check(self) -> None: ...
