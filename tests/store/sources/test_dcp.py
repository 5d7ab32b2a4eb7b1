"""Tests of DCP folders: read shard by shard, for every sharding, and rejected if they are
incomplete."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import assert_same, pooled
from store.sources.dcp_folder import edit_metadata, grid, save_alone, write_dcp
from store.sources.malicious import Marker
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from trained import Trained

from embedserve_store.errors import StoreError
from embedserve_store.sources.dcp import open_dcp

KEY = "model.ebc.embedding_bags.user.weight"
WEIGHT = torch.randn(11, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def trained(trained_by: Callable[[int], Trained]) -> Trained:
    """Returns row-wise, table-wise, column-wise and data-parallel tables, trained by two
    processes."""
    return trained_by(2)


def test_tables_of_a_training_run_are_read_exactly(trained: Trained) -> None:
    tensors, others = open_dcp(trained.checkpoint)
    for name, table in trained.tables.items():
        rows = tensors[f"model.sparse.ebc.embedding_bags.{name}.weight"]
        assert rows.dtype == "float32"
        assert torch.equal(rows.read(0, rows.shape[0]), table)
        numbers = np.random.default_rng(0).integers(0, len(table), 40)
        assert torch.equal(rows.gather(numbers), table[numbers])
    assert "model.over.0.weight" in tensors
    assert {"step", "model.over.0.bias"} < set(others)


def test_results_of_a_training_run_equal_its_unsharded_forward(trained: Trained) -> None:
    """Checks the reference of the other tests: nn.EmbeddingBag's results for the gathered
    tables."""
    for table, feature, pooling in trained.features:
        rows = trained.tables[table].numpy()
        assert_same(trained.answers[feature], pooled(rows, trained.bags[feature], pooling))


@pytest.mark.parametrize("rows", [11, 4, 1])
@pytest.mark.parametrize("columns", [8, 4, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_of_any_grid_are_assembled(
    tmp_path: Path, rows: int, columns: int, dtype: torch.dtype
) -> None:
    table = WEIGHT.to(dtype)
    tables = {"first": grid(table * 2, 11, 8), KEY: grid(table, rows, columns)}
    found = open_dcp(write_dcp(tmp_path / "c", tables))[0][KEY]
    assert (found.shape, found.dtype) == ((11, 8), str(dtype).removeprefix("torch."))
    assert torch.equal(found.read(0, 11), table)
    assert torch.equal(found.read(3, 9), table[3:9])


@pytest.mark.parametrize("single_file_per_rank", [True, False])
def test_replicated_tables_are_read_in_every_file_layout(
    tmp_path: Path, single_file_per_rank: bool
) -> None:
    model = {"a": WEIGHT, "b": WEIGHT.t(), "c": WEIGHT[2:5, 1:3]}
    save_alone({"model": model, "step": 1}, tmp_path, single_file_per_rank=single_file_per_rank)
    tensors, others = open_dcp(tmp_path)
    assert others == ("step",)
    for key, tensor in model.items():
        assert torch.equal(tensors[f"model.{key}"].read(0, len(tensor)), tensor)


def test_empty_shards_of_a_small_table_are_ignored(tmp_path: Path) -> None:
    shards = [*grid(WEIGHT, 6, 8), ((11, 0), torch.empty(0, 8))]
    found = open_dcp(write_dcp(tmp_path / "c", {KEY: shards}))[0][KEY]
    assert torch.equal(found.read(0, 11), WEIGHT)


def test_other_tensors_are_listed_by_name_only(tmp_path: Path) -> None:
    state = {"ids": torch.ones(2, 2, dtype=torch.int64), "cube": torch.ones(2, 2, 2), "w": WEIGHT}
    save_alone(state, tmp_path)
    tensors, others = open_dcp(tmp_path)
    assert list(tensors) == ["w"]
    assert sorted(others) == ["cube", "ids"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tables = {KEY: grid(WEIGHT, 6, 8), "sound": grid(WEIGHT, 11, 8)}
    return write_dcp(tmp_path / "checkpoint", tables)


def assert_read_fails(folder: Path, message: str) -> None:
    """Checks that reading KEY fails with an error that names it, although the folder opens."""
    tensors, _ = open_dcp(folder)
    with pytest.raises(StoreError, match=message) as caught:
        tensors[KEY]
    assert KEY in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_rejected_when_its_rows_are_read(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()
    assert_read_fails(folder, r"its shard at \[6, 0\] is missing: there is no file __1_0\.distcp")
    assert torch.equal(open_dcp(folder)[0]["sound"].read(0, 11), WEIGHT)


def test_truncated_file_is_rejected(folder: Path) -> None:
    whole = (folder / "__1_0.distcp").read_bytes()
    for size in (0, 100, len(whole) - 1):
        (folder / "__1_0.distcp").write_bytes(whole[:size])
        assert_read_fails(
            folder, r"shard at \[6, 0\] in __1_0\.distcp: truncated: .*ends before it"
        )


def _first_place(metadata: Metadata) -> Any:
    return metadata.storage_data[MetadataIndex(KEY, (0, 0))]


def _chunks(metadata: Metadata) -> Any:
    stored: Any = metadata.state_dict_metadata[KEY]
    return stored.chunks


def _forget_a_chunk(metadata: Metadata) -> None:
    _chunks(metadata).pop()


def _forget_a_place(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex(KEY, (6, 0))]


def _overlap(metadata: Metadata) -> None:
    _chunks(metadata)[1].offsets = torch.Size((5, 0))
    metadata.storage_data[MetadataIndex(KEY, (5, 0))] = metadata.storage_data[
        MetadataIndex(KEY, (6, 0))
    ]


def _other_dims(metadata: Metadata) -> None:
    _chunks(metadata)[0].sizes = torch.Size((6, 4))


def _other_dtype(metadata: Metadata) -> None:
    stored: Any = metadata.state_dict_metadata[KEY]
    stored.properties.dtype = torch.float16


def _other_place(metadata: Metadata) -> None:
    _first_place(metadata).offset += 1


def _more_rows(metadata: Metadata) -> None:
    stored: Any = metadata.state_dict_metadata[KEY]
    stored.size = torch.Size((12, 8))


def _fewer_columns(metadata: Metadata) -> None:
    stored: Any = metadata.state_dict_metadata[KEY]
    stored.size = torch.Size((11, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_forget_a_chunk, "rows 6 to 10: the values from column 0 on are not there"),
        (_forget_a_place, r"shard at \[6, 0\] is missing: \.metadata names no file for it"),
        (_overlap, "rows 5 to 5: columns 0 to 7 are there twice"),
        (_other_dims, r"is float32 \[6, 8\], expected float32 \[6, 4\]"),
        (_other_dtype, r"is float32 \[6, 8\], expected float16 \[6, 8\]"),
        (_other_place, r"not a file of torch\.save"),
        (_more_rows, "rows 11 to 11: the values from column 0 on are not there"),
        (_fewer_columns, r"columns 0 to 7, the table has shape \[11, 4\]"),
    ],
)
def test_shards_that_do_not_cover_the_table_are_rejected(
    folder: Path, change: Callable[[Metadata], None], message: str
) -> None:
    edit_metadata(folder, change)
    assert_read_fails(folder, message)


@pytest.mark.parametrize("offsets", [(6,), (6, 0, 0)])
def test_table_with_offsets_of_another_rank_is_no_table(
    folder: Path, offsets: tuple[int, ...]
) -> None:
    def change(metadata: Metadata) -> None:
        _chunks(metadata)[1].offsets = torch.Size(offsets)
        place = metadata.storage_data[MetadataIndex(KEY, (6, 0))]
        metadata.storage_data[MetadataIndex(KEY, offsets)] = place

    edit_metadata(folder, change)
    tensors, others = open_dcp(folder)
    assert KEY not in tensors
    assert KEY in others


def replace_shard(folder: Path, value: object) -> None:
    """Replaces a shard of the table with ``value``."""
    torch.save(value, folder / "__1_0.distcp")
    size = (folder / "__1_0.distcp").stat().st_size

    def resize(metadata: Metadata) -> None:
        place: Any = metadata.storage_data[MetadataIndex(KEY, (6, 0))]
        place.offset, place.length = 0, size

    edit_metadata(folder, resize)


def test_code_in_a_shard_is_rejected_and_not_executed(folder: Path) -> None:
    marker = folder.parent / "ran"
    replace_shard(folder, Marker(marker))
    assert_read_fails(folder, r"refused: it holds \S*mkdir")
    assert not marker.exists()


def test_shard_that_is_no_tensor_is_rejected(folder: Path) -> None:
    replace_shard(folder, {"a": WEIGHT})
    assert_read_fails(folder, "is not a plain 2-D floating-point tensor")


def test_unfinished_save_is_rejected(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(StoreError, match=r"has no \.metadata: save again and wait"):
        open_dcp(folder)


def test_checkpoint_saved_separately_by_each_rank_is_rejected(folder: Path) -> None:
    (folder / ".metadata").rename(folder / "__0.metadata")
    with pytest.raises(StoreError, match=r"each rank saved for itself \(use_collectives=False\)"):
        open_dcp(folder)


def test_dcp_values_in_safetensors_are_rejected(tmp_path: Path) -> None:
    """FileSystemReader itself does not find them either."""
    save_alone({KEY: WEIGHT}, tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    assert_read_fails(tmp_path, r"is safetensors: .* with SerializationFormat\.TORCH_SAVE")
