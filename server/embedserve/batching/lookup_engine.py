"""What the batcher asks of an engine."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class LookupEngine(Protocol):
    """One restored version of a model; engine/engine.py has the real one.

    Attributes:
        waits_for_device: a lookup is another device's work, for which the thread that asks waits:
            none is made on the event loop's thread, none is cut into pieces, and the device is
            given the next one before it is done with the last.
        replicas: of its rows, each of which has a device of its own and looks batches up beside
            the others; 1 where it waits for none.
    """

    waits_for_device: bool
    replicas: int

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        in_half: bool = False,
    ) -> np.ndarray: ...

    def to_float16(self, values: np.ndarray) -> np.ndarray: ...

    def check(self) -> None: ...
