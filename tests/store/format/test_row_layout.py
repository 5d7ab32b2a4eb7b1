"""Tests of the bytes of rows: FBGEMM's kernels can read them."""

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embedserve_store.format.row_layout import dequantize_rows, encode_rows, unstorable_rows
from embedserve_store.format.table_spec import DTYPES, row_bytes, stored_columns

BITS = {"int8": 8, "int4": 4}

blocks = st.tuples(st.integers(1, 20), st.integers(1, 33)).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(-1000, 1000, width=32))
)


@given(blocks, st.sampled_from(DTYPES))
def test_encoded_rows_have_the_row_bytes_of_their_dtype(block: np.ndarray, dtype: str) -> None:
    rows = encode_rows(torch.from_numpy(block), dtype)
    assert rows.dtype == np.uint8
    assert rows.shape == (len(block), row_bytes(dtype, stored_columns(block.shape[1])))
    assert len(unstorable_rows(rows, dtype)) == 0


@given(blocks)
def test_float32_rows_round_trip_exactly(block: np.ndarray) -> None:
    rows = encode_rows(torch.from_numpy(block), "float32")
    wide = np.zeros((len(block), stored_columns(block.shape[1])), np.float32)
    wide[:, : block.shape[1]] = block
    assert rows.tobytes() == wide.tobytes()
    np.testing.assert_array_equal(dequantize_rows(rows, "float32", block.shape[1]), block)


@given(blocks)
def test_float16_rows_are_rounded_once(block: np.ndarray) -> None:
    rows = encode_rows(torch.from_numpy(block), "float16")
    expected = block.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(dequantize_rows(rows, "float16", block.shape[1]), expected)


@given(blocks, st.sampled_from(sorted(BITS)))
def test_quantized_rows_match_fbgemm_with_scale_and_bias_first(
    block: np.ndarray, dtype: str
) -> None:
    ops = torch.ops.fbgemm
    # The padding of a row repeats one of its values, so it does not change the row's scale.
    missing = stored_columns(block.shape[1]) - block.shape[1]
    wide = torch.from_numpy(np.pad(block, ((0, 0), (0, missing)), mode="edge"))
    fbgemm_rows = ops.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(wide, BITS[dtype])
    rows = encode_rows(torch.from_numpy(block), dtype)
    np.testing.assert_array_equal(rows[:, :4], fbgemm_rows.numpy()[:, -4:])
    np.testing.assert_array_equal(rows[:, 4:], fbgemm_rows.numpy()[:, :-4])
    expected = ops.FusedNBitRowwiseQuantizedSBHalfToFloat(fbgemm_rows, BITS[dtype]).numpy()
    expected = expected[:, : block.shape[1]]
    found = dequantize_rows(rows, dtype, block.shape[1])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(block).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_inference_kernel_results_match_dequantized_rows(dtype: str) -> None:
    block = torch.randn(10, 12, generator=torch.Generator().manual_seed(1))
    rows = encode_rows(block, dtype)
    sparse = {"float32": "FP32", "float16": "FP16", "int8": "INT8", "int4": "INT4"}[dtype]
    tbe = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", 10, 12, SparseType[sparse], EmbeddingLocation.HOST)],
        device="cpu",
        output_dtype=SparseType.FP32,
        row_alignment=1,
    )
    tbe.initialize_weights()
    tbe.weights_host[: rows.size] = torch.from_numpy(rows.reshape(-1).copy())
    ids = torch.arange(10, dtype=torch.int32)
    answers = tbe(ids, torch.arange(11, dtype=torch.int32)).numpy()
    np.testing.assert_allclose(answers, dequantize_rows(rows, dtype, 12), rtol=1e-6, atol=1e-6)


def test_int4_stores_the_first_code_in_the_low_nibble() -> None:
    scale_bias = np.array([[2, -1]], "<f2").view(np.uint8)
    rows = np.concatenate([scale_bias, np.array([[0x10, 0xF2]], np.uint8)], axis=1)
    np.testing.assert_array_equal(dequantize_rows(rows, "int4", 4), [[-1, 1, 3, 29]])


def test_a_float16_source_quantizes_as_its_float32_values() -> None:
    half = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)).half()
    for dtype in DTYPES:
        np.testing.assert_array_equal(encode_rows(half, dtype), encode_rows(half.float(), dtype))


def test_a_transposed_block_is_stored_row_by_row() -> None:
    block = torch.arange(16, dtype=torch.float32).reshape(4, 4)
    for dtype in DTYPES:
        expected = encode_rows(block.T.contiguous(), dtype)
        np.testing.assert_array_equal(encode_rows(block.T, dtype), expected)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_rows_beyond_the_float16_range_are_detected(dtype: str) -> None:
    block = torch.zeros(3, 4)
    block[1] = 70000
    assert unstorable_rows(encode_rows(block, dtype), dtype).tolist() == [1]
