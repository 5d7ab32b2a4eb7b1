"""Steps on the values of a lookup on the CPU: means are divided, and values converted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from embedserve_store.format.manifest import KeyColumns


def divide_means(values: np.ndarray, lengths: np.ndarray, means: Sequence[KeyColumns]) -> None:
    """Divides sums by the numbers of ids, in place.

    Args:
        values: float32 [B, sum of dims].
        lengths: int32 [F * B].
        means: columns of the tables with mean pooling.
    """
    counts = np.maximum(lengths, 1).reshape(-1, len(values))
    for column in means:
        values[:, column.start : column.end] /= counts[column.feature, :, None]


def to_float16(values: np.ndarray) -> np.ndarray:
    """Returns ``values`` rounded to float16; values beyond 65504 become infinite. numpy takes
    thirty times as long."""
    rounded: np.ndarray = torch.from_numpy(values).to(torch.float16).numpy()
    return rounded


def to_float32(values: np.ndarray) -> np.ndarray:
    """Returns ``values``, float16 or float32, as float32."""
    converted: np.ndarray = torch.from_numpy(values).to(torch.float32).numpy()
    return converted
