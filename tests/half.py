"""Stored int8 and int4 rows as FBGEMM's CUDA kernels dequantize them, step by step.

Written from vecn.cuh (dequantize_permuted_int8, dequantize_permuted_int4): a code's bits are read
as a float16, which is code / 2**24; times 32768 that is a normal number; one fused multiply-add
takes it times 512 times the scale (32 times, where an int4 code stands in the upper half of its
byte), plus the bias, rounded to float16 once. What follows is added up in float32.
"""

from __future__ import annotations

import numpy as np

from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.format.table_spec import CODES_MAX, SCALE_BIAS_BYTES


def rows_in_half(rows: np.ndarray, dtype: str, dim: int) -> np.ndarray:
    """float32 [n, dim] of stored bytes [n, row_bytes]; of float32 and float16 rows unchanged."""
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
    """float16 of ``bits`` (uint16) times ``factor`` plus ``bias``, which float64 holds exactly."""
    normal = (bits.view(np.float16) * np.float16(32768)).astype(np.float64)
    result: np.ndarray = (normal * factor + bias).astype(np.float16)
    return result
