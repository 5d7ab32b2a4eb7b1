"""Tests of files of torch.save: opened without their values, read as rows, and never executed."""

import io
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store.sources.malicious import Marker

from embedserve_store.errors import StoreError
from embedserve_store.sources import torch_file
from embedserve_store.sources.file_rows import RECTANGLES_MAX, Rectangle
from embedserve_store.sources.torch_file import open_torch_file

WEIGHT = torch.randn(11, 8, generator=torch.Generator().manual_seed(3))
KEY = "ebc.embedding_bags.user.weight"


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def test_nested_tensors_are_read_and_other_values_named(tmp_path: Path) -> None:
    content = {
        "model": {KEY: torch.nn.Parameter(WEIGHT), "over.bias": torch.ones(8)},
        "optimizer": {"state": {0: {"sum": WEIGHT * 2, "step": 3}}, "param_groups": [{"lr": 0.1}]},
        "hits": torch.ones(3, 3, dtype=torch.int64),
    }
    tensors, others = open_torch_file(saved(tmp_path / "s.pt", content))
    assert list(tensors) == [f"model.{KEY}", "optimizer.state.0.sum"]
    assert others == ("model.over.bias", "optimizer.state.0.step", "optimizer.param_groups", "hits")
    assert torch.equal(tensors[f"model.{KEY}"].read(2, 9), WEIGHT[2:9])
    assert torch.equal(
        tensors["optimizer.state.0.sum"].gather(np.array([10, 0])), WEIGHT[[10, 0]] * 2
    )


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[3:7],
        lambda t: t[::3],
        lambda t: t[1:, 2:6],
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[:1].expand(5, -1),
        lambda t: t[:0],
        lambda t: t.double(),
        lambda t: t.half(),
        lambda t: t.bfloat16(),
    ],
)
def test_every_view_of_a_storage_is_read_exactly(
    tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = view(WEIGHT)
    tensors, _ = open_torch_file(saved(tmp_path / "s.pt", {"before": WEIGHT, KEY: tensor}))
    rows = tensors[KEY]
    assert rows.shape == tuple(tensor.shape)
    assert rows.dtype == str(tensor.dtype).removeprefix("torch.")
    assert torch.equal(rows.read(0, len(tensor)), tensor)
    if len(tensor):
        last = len(tensor) - 1
        assert torch.equal(rows.gather(np.array([last, 0])), tensor[[last, 0]])


def test_code_in_a_checkpoint_is_rejected_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = saved(tmp_path / "s.pt", {KEY: WEIGHT, "x": Marker(marker)})
    with pytest.raises(StoreError, match=r"s\.pt: refused: it holds \S*mkdir") as caught:
        open_torch_file(path)
    assert not marker.exists()
    assert "\n" not in str(caught.value)


def test_bare_pickle_is_rejected_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "s.pkl").write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(StoreError, match=r"not a file of torch\.save"):
        open_torch_file(tmp_path / "s.pkl")
    assert not marker.exists()
    pickle.loads((tmp_path / "s.pkl").read_bytes())  # noqa: S301  the marker works
    assert marker.exists()


def test_format_before_torch_1_6_is_rejected_with_advice(tmp_path: Path) -> None:
    path = saved(tmp_path / "s.pt", {KEY: WEIGHT}, _use_new_zipfile_serialization=False)
    with pytest.raises(StoreError, match=r"before torch 1\.6: load it there and save it anew"):
        open_torch_file(path)


def test_torchscript_file_is_rejected(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "s.pt")
    with pytest.raises(StoreError, match=r"s\.pt: not a state dict as torch\.save writes it"):
        open_torch_file(tmp_path / "s.pt")


def test_truncated_checkpoint_is_rejected(tmp_path: Path) -> None:
    whole = saved(tmp_path / "s.pt", {"w": torch.ones(500, 10)}).read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "s.pt").write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"s\.pt: .*truncated"):
            open_torch_file(tmp_path / "s.pt")


def test_flipped_byte_yields_rows_or_a_store_error(tmp_path: Path) -> None:
    whole = saved(tmp_path / "s.pt", {KEY: WEIGHT[:3], "t": WEIGHT[:3].t()}).read_bytes()
    messages = []
    for i in range(0, len(whole), 3):
        (tmp_path / "s.pt").write_bytes(whole[:i] + bytes([whole[i] ^ 0x81]) + whole[i + 1 :])
        try:
            for rows in open_torch_file(tmp_path / "s.pt")[0].values():
                rows.read(0, rows.shape[0])
        except StoreError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert not [message for message in messages if "\n" in message]


def test_compressed_values_are_rejected(tmp_path: Path) -> None:
    whole = io.BytesIO(saved(tmp_path / "s.pt", {KEY: WEIGHT}).read_bytes())
    with (
        zipfile.ZipFile(whole) as plain,
        zipfile.ZipFile(tmp_path / "s.pt", "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for info in plain.infolist():
            compressed.writestr(info.filename, plain.read(info))
    with pytest.raises(StoreError, match=r"s\.pt: "):
        open_torch_file(tmp_path / "s.pt")[0][KEY]


def test_values_of_another_byte_order_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", "big")
        saved(tmp_path / "s.pt", {KEY: WEIGHT})
    with pytest.raises(StoreError, match=r"s\.pt: written on a machine of another byte order"):
        open_torch_file(tmp_path / "s.pt")


def test_record_larger_than_the_file_is_rejected_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would decompress such a record whole, into gigabytes from a file of megabytes."""
    with zipfile.ZipFile(tmp_path / "s.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("s/data.pkl", pickle.dumps({KEY: bytes(100_000)}))
        bomb.writestr("s/version", "3\n")
    monkeypatch.delattr(torch, "load")
    with pytest.raises(StoreError, match=r"s\.pt: a record is larger than the file"):
        open_torch_file(tmp_path / "s.pt")


def test_tensor_larger_than_its_record_is_rejected(tmp_path: Path) -> None:
    small, large = WEIGHT[:2].clone(), WEIGHT.clone()
    saved(tmp_path / "s.pt", {KEY: large})
    with zipfile.ZipFile(tmp_path / "s.pt") as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(tmp_path / "s.pt", "w") as archive:
        for name, data in records.items():
            cut = name.endswith("/data/0")
            archive.writestr(name, data[: small.numel() * 4] if cut else data)
    tensors, _ = open_torch_file(tmp_path / "s.pt")
    with pytest.raises(StoreError, match=r"values are not in the file as torch\.save stores them"):
        tensors[KEY]


@pytest.mark.parametrize("columns", [10**6, 10**12])
def test_wide_expanded_tensor_creates_no_rectangles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    made: list[None] = []

    class Counted(Rectangle):
        def __init__(self, *fields: Any) -> None:
            super().__init__(*fields)
            made.append(None)

    monkeypatch.setattr(torch_file, "Rectangle", Counted)
    wide = torch.zeros(1, 1).expand(1, columns)
    path = saved(tmp_path / "s.pt", {"wide": wide, KEY: WEIGHT})
    assert path.stat().st_size < 4000
    tensors, _ = open_torch_file(path)
    assert list(tensors) == ["wide", KEY]
    assert not made
    with pytest.raises(StoreError, match=r"s\.pt: wide: its values lie in more than 100,000 piec"):
        tensors["wide"]
    assert len(made) == RECTANGLES_MAX + 1
    assert torch.equal(tensors[KEY].read(0, 11), WEIGHT)


@pytest.mark.parametrize("content", [torch.ones(3), [WEIGHT], 3])
def test_other_content_than_a_state_dict_is_rejected(tmp_path: Path, content: Any) -> None:
    with pytest.raises(StoreError, match=f"holds a {type(content).__name__}, expected a state"):
        open_torch_file(saved(tmp_path / "s.pt", content))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="none: cannot be read: No such file"):
        open_torch_file(tmp_path / "none")


def test_named_pipe_is_rejected_without_waiting_for_its_writer(pipe: Path) -> None:
    with pytest.raises(StoreError, match="pipe: is no regular file"):
        open_torch_file(pipe)
