"""What the batcher asks of an engine."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class LookupEngine(Protocol):
    """One restored version of a model; engine/engine.py has the real one."""

    def lookup(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None
    ) -> np.ndarray: ...

    def to_float16(self, values: np.ndarray) -> np.ndarray: ...

    def check(self) -> None: ...
