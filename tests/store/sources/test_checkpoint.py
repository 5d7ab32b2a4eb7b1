"""Tests of checkpoints: every kind opens alike, and tables are found by their keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from store.sources.dcp_folder import grid, save_alone, write_dcp
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.sources.checkpoint import (
    Checkpoint,
    check_rows,
    find_tables,
    from_state_dict,
    open_checkpoint,
)
from embedserve_store.sources.description_draft import draft_description
from embedserve_store.sources.rows import TableRows, TensorRows

KEY = "ebc.embedding_bags.user.weight"
WEIGHT = torch.randn(10, 4, generator=torch.Generator().manual_seed(3))
USER = TableSpec("user", 10, 4, ("user", "friend"), "sum", "float32")
WORD = TableSpec("user", 10, 4, ("user",), "none", "float32")
STATE = {KEY: WEIGHT, "over.bias": torch.ones(4)}


def saved(kind: str, folder: Path) -> Path:
    if kind == "dcp":
        save_alone(STATE, folder / "c")
        return folder / "c"
    if kind == "torch_save":
        torch.save(STATE, folder / "c.pt")
        return folder / "c.pt"
    save_file(STATE, folder / "c.safetensors")
    return folder if kind == "safetensors folder" else folder / "c.safetensors"


@pytest.mark.parametrize("kind", ["dcp", "torch_save", "safetensors", "safetensors folder"])
def test_every_checkpoint_format_yields_the_same_tables(tmp_path: Path, kind: str) -> None:
    path = saved(kind, tmp_path)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.kind, checkpoint.path) == (kind.split()[0], path)
    rows, skipped = find_tables(checkpoint, [USER])
    assert torch.equal(rows["user"].read(0, 10), WEIGHT)
    assert skipped == ("over.bias",)


def test_state_dict_in_memory_is_a_checkpoint() -> None:
    empty = torch.ones(3, 4, device="meta")
    checkpoint = from_state_dict({"model": torch.nn.ModuleDict().state_dict() | STATE, "e": empty})
    assert checkpoint.kind == "state_dict"
    rows, skipped = find_tables(checkpoint, [USER])
    assert torch.equal(rows["user"].read(0, 10), WEIGHT)
    assert skipped == ("model.over.bias", "e")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "none: cannot be read: No such file"),
        ("", "a folder without .metadata, .* and without .safetensors files"),
        ("c/.metadata", "is a part of a checkpoint, give its folder"),
        ("c/__0_0.distcp", "is a part of a checkpoint, give its folder"),
    ],
)
def test_invalid_checkpoint_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    saved("dcp", tmp_path)
    with pytest.raises(StoreError, match=message):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("url", ["s3://bucket/step-1000", "s3://bucket/a.safetensors"])
def test_url_as_checkpoint_is_rejected(url: str) -> None:
    for given in (url, Path(url)):
        with pytest.raises(StoreError, match=f"^{url}: a checkpoint is a path, never a URL"):
            open_checkpoint(given)


def test_checkpoint_folder_name_may_end_in_a_colon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("step:").mkdir()
    path = saved("torch_save", Path("step:"))
    assert open_checkpoint(path).path == path


@pytest.mark.parametrize("before", ["", "model.", "model.sparse.0.", "a.embeddings."])
def test_tables_are_found_at_any_module_path(before: str) -> None:
    key = f"{before}embedding_bags.user.weight"
    rows, skipped = find_tables(from_state_dict({key: WEIGHT, "epoch": 3}), [USER])
    assert torch.equal(rows["user"].read(2, 4), WEIGHT[2:4])
    assert skipped == ("epoch",)


@pytest.mark.parametrize("name", ["embeddings", "a.b", "embedding_bags", "weight"])
def test_table_names_that_look_like_paths_are_found(name: str) -> None:
    table = TableSpec(name, 10, 4, ("f",), "sum", "float32")
    state = {f"ebc.embedding_bags.{name}.weight": WEIGHT}
    assert list(find_tables(from_state_dict(state), [table])[0]) == [name]


def test_optimizer_state_is_never_a_table() -> None:
    """Uses the keys of TorchRec's fused and keyed optimizers, flat or nested."""
    optimizer = {
        f"optim.state.{KEY}.user.momentum1": WEIGHT * 2,
        f"optim.state.{KEY}.exp_avg": WEIGHT * 3,
        "optim": {"state": {KEY: {"sum": WEIGHT * 4, f"{KEY}.momentum2": WEIGHT * 5}}},
        "param_groups": {f"{KEY}.lr": 0.1},
    }
    rows, skipped = find_tables(from_state_dict(STATE | optimizer), [USER])
    assert torch.equal(rows["user"].read(0, 10), WEIGHT)
    assert len(skipped) == 6


def test_pooled_and_unpooled_collections_are_distinguished() -> None:
    state = {KEY: WEIGHT, "ec.embeddings.user.weight": WEIGHT * 2}
    checkpoint = from_state_dict(state)
    assert torch.equal(find_tables(checkpoint, [USER])[0]["user"].read(0, 10), WEIGHT)
    assert torch.equal(find_tables(checkpoint, [WORD])[0]["user"].read(0, 10), WEIGHT * 2)
    with pytest.raises(
        InvalidModelError, match=r"pooling is none, .* in an EmbeddingBagCollection"
    ):
        find_tables(from_state_dict({KEY: WEIGHT}), [WORD])
    with pytest.raises(InvalidModelError, match=r"pooling is sum, .* in an EmbeddingCollection"):
        find_tables(from_state_dict({"ec.embeddings.user.weight": WEIGHT}), [USER])


def test_prefix_chooses_among_collections() -> None:
    state = {
        f"model.{KEY}": WEIGHT,
        f"ema.{KEY}": WEIGHT * 2,
        "embedding_bags.user.weight": WEIGHT * 3,
    }
    checkpoint = from_state_dict(state)
    with pytest.raises(
        InvalidModelError,
        match=r"'user': 3 collections have it: model\.ebc, ema\.ebc, \.; choose one",
    ):
        find_tables(checkpoint, [USER])
    for prefix in ("ema", "ema.ebc", "ema.ebc."):
        rows, skipped = find_tables(checkpoint, [USER], prefix)
        assert torch.equal(rows["user"].read(0, 10), WEIGHT * 2)
        assert len(skipped) == 2
    rows, _ = find_tables(checkpoint, [USER], ".")
    assert torch.equal(rows["user"].read(0, 10), WEIGHT * 3)
    for prefix in ("em", "ebc", "ema.ebc.embedding_bags.user"):
        with pytest.raises(
            InvalidModelError,
            match=rf"no key under '{prefix}' ends in .* tables under model\.ebc, ema\.ebc, \.$",
        ):
            find_tables(checkpoint, [USER], prefix)
    with pytest.raises(InvalidModelError, match=r"^no key ends in .*weight, of 1 entries$"):
        find_tables(from_state_dict({"user": WEIGHT}), [USER])


def test_collection_at_the_prefix_takes_precedence_over_nested_collections() -> None:
    state = {f"a.{KEY}": WEIGHT, f"a.ebc.tower.{KEY}": WEIGHT * 2}
    checkpoint = from_state_dict(state)
    assert torch.equal(find_tables(checkpoint, [USER], "a.ebc")[0]["user"].read(0, 10), WEIGHT)
    with pytest.raises(InvalidModelError, match="2 collections have it"):
        find_tables(checkpoint, [USER], "a")


def test_keys_of_many_tables_are_found_without_a_search_for_each() -> None:
    """The time of such searches grows with the square of the number of tables."""
    compared = 0

    class Text(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    names = [f"t{i}" for i in range(100)]
    rows: dict[str, TableRows] = {
        Text(f"ebc.embedding_bags.{name}.weight"): TensorRows(WEIGHT) for name in names
    }
    checkpoint = Checkpoint("state_dict", Path("state dict"), rows, ())
    tables = [TableSpec(Text(name), 10, 4, (name,), "sum", "float32") for name in names]
    assert [*find_tables(checkpoint, tables)[0]] == names
    assert len(draft_description(checkpoint).splitlines()) > len(names)
    assert compared < 10 * len(names)


def test_missing_table_error_lists_existing_tables() -> None:
    state = {"x_embedding_bags.user.weight": WEIGHT, "m.embedding_bags.users.weight": WEIGHT}
    with pytest.raises(
        InvalidModelError,
        match=r"'user': no key ends in embedding_bags\.user\.weight; the tables there are users$",
    ):
        find_tables(from_state_dict(state), [USER])


@pytest.mark.parametrize(
    "value", [torch.ones(40), torch.ones(10, 4).to_sparse(), torch.ones(10, 8).byte(), [1.0]]
)
def test_entry_that_is_no_matrix_of_rows_is_rejected(value: Any) -> None:
    with pytest.raises(
        InvalidModelError, match=rf"'user': {KEY} is not a .* as trained, not quantized$"
    ):
        find_tables(from_state_dict({KEY: value}), [USER])


def with_processors(named: bool) -> FeatureProcessedEmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="user", num_embeddings=10, embedding_dim=4, feature_names=["user"]
    )
    ebc = EmbeddingBagCollection(tables=[config], is_weighted=True)
    processors = {"user": PositionWeightedModule(5)}
    whole = PositionWeightedModuleCollection({"user": 5})
    return FeatureProcessedEmbeddingBagCollection(ebc, processors if named else whole)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("prefix", ["", "fp", "fp._embedding_bag_collection"])
def test_tables_behind_feature_processors_are_rejected(
    tmp_path: Path, named: bool, prefix: str
) -> None:
    torch.save(torch.nn.ModuleDict({"fp": with_processors(named)}).state_dict(), tmp_path / "fp.pt")
    with pytest.raises(
        InvalidModelError, match=r"^table 'user': fp\._feature_processors beside it changes ids or"
    ):
        find_tables(open_checkpoint(tmp_path / "fp.pt"), [USER], prefix)
    with pytest.raises(InvalidModelError, match="'user': _feature_processors beside it changes"):
        find_tables(from_state_dict(with_processors(named).state_dict()), [USER], "")


@pytest.mark.parametrize("module", ["_itep_module", "_rowwise_itep_module"])
@pytest.mark.parametrize("collection", ["embedding_bag_collection", "embedding_collection"])
def test_tables_with_rows_pruned_in_training_are_rejected(collection: str, module: str) -> None:
    kind, table = (
        ("embeddings", WORD) if collection == "embedding_collection" else ("embedding_bags", USER)
    )
    state = {
        f"m._{collection}.{kind}.user.weight": WEIGHT,
        f"m.{module}.user_itp_address_lookup": torch.arange(10),
    }
    with pytest.raises(InvalidModelError, match=rf"m\.{module} beside it changes ids"):
        find_tables(from_state_dict(state), [table])


def test_rows_by_id_of_a_virtual_table_are_rejected() -> None:
    """TorchRec stores the ids beside the rows, which are in any order."""
    state = {KEY: WEIGHT, f"{KEY}_id": torch.arange(10)[:, None]}
    with pytest.raises(
        InvalidModelError, match=rf"^table 'user': {KEY}_id has the ids of its rows"
    ):
        find_tables(from_state_dict(state), [USER])


def test_feature_processors_of_other_modules_are_ignored() -> None:
    state = {
        "a._embedding_bag_collection.embedding_bags.user.weight": WEIGHT,
        "_feature_processors.f.position_weight": torch.ones(5),
        "b._feature_processors.f.position_weight": torch.ones(5),
    }
    assert list(find_tables(from_state_dict(state), [USER])[0]) == ["user"]


def test_damaged_shards_name_the_table(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "c", {KEY: grid(WEIGHT, 5, 4)})
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(StoreError, match=r"^table 'user': .* there is no file __1_0\.distcp"):
        find_tables(open_checkpoint(folder), [USER])


def rows_of(checkpoint: Checkpoint) -> Any:
    return find_tables(checkpoint, [USER])[0]["user"]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(10, 8), r"has shape \[10, 8\], described is \[10, 4\]"),
        (torch.ones(4, 10), r"has shape \[4, 10\], described is \[10, 4\]"),
        (WEIGHT.double(), "is float64, expected one of float32, float16, bfloat16"),
        (WEIGHT.to(torch.float8_e4m3fn), "is float8_e4m3fn, expected one of"),
    ],
)
def test_rows_of_another_shape_or_dtype_are_rejected(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidModelError, match=f"table 'user': its weight {message}"):
        check_rows(USER, rows_of(from_state_dict({KEY: weight})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_publishable_rows_are_accepted(dtype: torch.dtype) -> None:
    check_rows(USER, TensorRows(torch.nn.Parameter(WEIGHT.to(dtype))))
