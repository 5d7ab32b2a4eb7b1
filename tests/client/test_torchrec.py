"""Tests with torch: a KeyedJaggedTensor in, a KeyedTensor out. Without torch nothing imports it."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from embedserve_client.core.batch import batch_of
from embedserve_client.core.result import EmbedResult, Layout
from embedserve_client.errors import InvalidRequest


def test_importing_the_client_does_not_import_torch() -> None:
    code = (
        "import sys, embedserve_client; "
        "print([name for name in ('torch', 'torchrec', 'fbgemm_gpu') if name in sys.modules])"
    )
    environment_path = [entry for entry in sys.path if entry]
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {environment_path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout.strip() == "[]"


def test_keyed_jagged_tensor_is_read_as_a_batch() -> None:
    tensor = KeyedJaggedTensor(
        keys=["product", "user"],
        values=torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32),
        lengths=torch.tensor([2, 0, 1, 1, 1, 1]),
        weights=torch.tensor([0.5, 1, 1, 1, 1, 1], requires_grad=True),
    )

    batch = batch_of(tensor)

    assert (batch.keys, batch.batch_size) == (("product", "user"), 3)
    assert (batch.ids.dtype, batch.ids.tolist()) == (np.dtype(np.int64), [1, 2, 3, 4, 5, 6])
    assert (batch.lengths.dtype, batch.lengths.tolist()) == (np.dtype(np.int32), [2, 0, 1, 1, 1, 1])
    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5, 1, 1, 1, 1, 1]


def test_batch_size_per_key_is_rejected() -> None:
    tensor = KeyedJaggedTensor(
        keys=["product", "user"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )

    with pytest.raises(InvalidRequest, match="another batch size for every key"):
        batch_of(tensor)


def test_result_becomes_a_writable_keyed_tensor() -> None:
    values = np.frombuffer(np.arange(6, dtype="<f4").tobytes(), "<f4").reshape(2, 3)
    result = EmbedResult(values, Layout(("movie", "user"), (2, 1)), "shop", 7)

    tensor = result.to_keyed_tensor()
    tensor.values().add_(1)

    assert isinstance(tensor, KeyedTensor)
    assert tensor.keys() == ["movie", "user"]
    assert tensor["user"].tolist() == [[3], [6]]
    assert result["user"].tolist() == [[2], [5]]


def test_tensors_have_the_dtype_of_the_result() -> None:
    values = np.frombuffer(np.arange(4, dtype="<f2").tobytes(), "<f2").reshape(2, 2)
    layout, lengths = Layout(("movie",), (2,)), np.array([[2]], np.int32)

    tensor = EmbedResult(values, layout, "shop", 7).to_keyed_tensor()["movie"]
    rows = EmbedResult(values, layout, "sequence", 7, {}, lengths).to_jagged_tensors()["movie"]

    assert (tensor.dtype, rows.values().dtype) == (torch.float16, torch.float16)
    assert tensor.tolist() == rows.values().tolist() == [[0, 1], [2, 3]]


def test_unpooled_result_becomes_a_jagged_tensor_for_each_key() -> None:
    values = np.frombuffer(np.arange(8, dtype="<f4").tobytes(), "<f4").reshape(4, 2)
    lengths = np.array([[0, 3], [1, 0]], np.int32)
    layout = Layout(("movie", "user"), (2, 2))
    result = EmbedResult(values, layout, "sequence", 7, {}, lengths)

    tensors = result.to_jagged_tensors()
    tensors["user"].values().add_(1)

    assert all(isinstance(tensor, JaggedTensor) for tensor in tensors.values())
    assert [one.tolist() for one in tensors["movie"].to_dense()] == [[], [[0, 1], [2, 3], [4, 5]]]
    assert tensors["user"].lengths().tolist() == [1, 0]
    assert result["user"].values.tolist() == [[6, 7]]
