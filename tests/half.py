"""Stored int8 and int4 rows, dequantized step by step like FBGEMM's CUDA kernels do.

Follows dequantize_permuted_int8 and dequantize_permuted_int4 in vecn.cuh. The kernels read the bits
of a code as a float16, which is code / 2**24. Multiplied by 32768 it is a normal number. One fused
multiply-add multiplies it by 512 times the scale, adds the bias and rounds to float16 once. For an
int4 code in the upper half of its byte the factor is 32 times the scale. The kernels add up the
float16 values in float32.
"""

import numpy as np

from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.format.table_spec import CODES_MAX, SCALE_BIAS_BYTES


def rows_in_half(rows: np.ndarray, dtype: str, dim: int) -> np.ndarray:
    """Returns stored bytes [n, row_bytes] as float32 [n, dim].

    float32 and float16 rows are unchanged.
    """
    if dtype not in CODES_MAX:
        return dequantize_rows(rows, dtype, dim)
    heads = np.ascontiguousarray(rows[:, :SCALE_BIAS_BYTES]).view("<f2")
    scale, bias = heads[:, :1], heads[:, 1:]
    codes = rows[:, SCALE_BIAS_BYTES:].astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "int8":
            values = _fused(codes, scale * np.float16(512), bias)
        else:
            lower = _fused(codes & 0x0F, scale * np.float16(512), bias)
            upper = _fused(codes & 0xF0, scale * np.float16(32), bias)
            values = np.stack((lower, upper), axis=2).reshape(len(rows), -1)
    return values[:, :dim].astype(np.float32)


def _fused(bits: np.ndarray, factor: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Returns ``bits`` (uint16) times ``factor`` plus ``bias`` as float16.

    float64 holds the exact value.
    """
    normal = (bits.view(np.float16) * np.float16(32768)).astype(np.float64)
    result: np.ndarray = (normal * factor + bias).astype(np.float16)
    return result
