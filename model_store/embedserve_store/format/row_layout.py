"""Encodes and decodes rows in FBGEMM's inference layout.

float32 and float16 rows are plain little-endian numbers. An int8 or int4 row is its scale and
bias (float16 each), then the codes: value = code * scale + bias. An int4 byte holds two codes, the
first in its low half. FBGEMM's quantize op puts scale and bias behind the codes. Its inference
kernels (TBE) read them in front, so this module moves them. A stored row is padded to a multiple of
4 columns; responses do not contain the padding. table_spec.py has the sizes of rows. The server's
engine reads only the scale and bias, and cuts rows into column shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.table_spec import SCALE_BIAS_BYTES, stored_columns

if TYPE_CHECKING:
    import torch

_BITS = {"int8": 8, "int4": 4}


def encode_rows(block: torch.Tensor, dtype: str) -> NDArray[np.uint8]:
    """Encodes rows [n, dim] (float32 or float16, on the CPU) as stored bytes [n, row_bytes]."""
    import torch

    block = _filled_up(block, dtype)
    if dtype in _BITS:
        return _quantize(block, _BITS[dtype])
    # Values outside the range of float16 become infinite; unstorable_rows finds them.
    target = torch.float32 if dtype == "float32" else torch.float16
    return block.to(target).contiguous().numpy().view(np.uint8)


def _filled_up(block: torch.Tensor, dtype: str) -> torch.Tensor:
    """Pads ``block`` to the number of stored columns.

    Float rows are padded with zeros. int8 and int4 rows are padded with their last value, so that
    the padding does not change the row's scale.
    """
    missing = stored_columns(block.shape[1]) - block.shape[1]
    if not missing:
        return block
    import torch

    last = block[:, -1:] if dtype in _BITS else torch.zeros_like(block[:, -1:])
    return torch.cat((block, last.expand(-1, missing)), dim=1)


def _quantize(block: torch.Tensor, bits: int) -> NDArray[np.uint8]:
    import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
    import torch

    quantize = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf
    behind: NDArray[np.uint8] = quantize(block.contiguous(), bits).numpy()
    return np.roll(behind, SCALE_BIAS_BYTES, axis=1)


def unstorable_rows(rows: NDArray[np.uint8], dtype: str) -> NDArray[np.intp]:
    """Returns the numbers of encoded rows with a value, scale or bias that is not finite.

    Such a number was not finite in the source, or is outside the range of its stored dtype.
    """
    numbers = np.ascontiguousarray(rows[:, :SCALE_BIAS_BYTES] if dtype in _BITS else rows)
    is_finite = np.isfinite(numbers.view("<f4" if dtype == "float32" else "<f2"))
    if is_finite.all():  # the usual case, four times as fast as row by row
        return np.zeros(0, np.intp)
    return np.flatnonzero(~is_finite.all(axis=1))


def dequantize_rows(rows: NDArray[np.uint8], dtype: str, dim: int) -> NDArray[np.float32]:
    """Decodes stored bytes [n, row_bytes] to the values [n, dim] that a lookup adds up."""
    rows = np.ascontiguousarray(rows)
    if dtype in ("float32", "float16"):
        return rows.view("<f4" if dtype == "float32" else "<f2")[:, :dim].astype(np.float32)
    scale_bias = np.ascontiguousarray(rows[:, :SCALE_BIAS_BYTES]).view("<f2").astype(np.float32)
    codes = rows[:, SCALE_BIAS_BYTES:]
    if dtype == "int4":
        halves = np.stack((codes & 0x0F, codes >> 4), axis=2)
        codes = halves.reshape(len(rows), 2 * codes.shape[1])
    return codes[:, :dim].astype(np.float32) * scale_bias[:, :1] + scale_bias[:, 1:]
