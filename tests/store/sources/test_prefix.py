"""Tests of prefixes: a prefix means the same collection in every source of a model."""

from collections.abc import Callable
from pathlib import Path

import pooled
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torchrec import EmbeddingBagCollection, PoolingType
from torchrec.distributed import DistributedModelParallel

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.publishing.publish_source import make_source
from embedserve_store.sources.checkpoint import open_checkpoint
from embedserve_store.sources.description_draft import draft_description
from embedserve_store.sources.live_dmp import describe_sharded
from embedserve_store.sources.prefix import at_prefix

TABLE = TableSpec("t", 6, 4, ("f",), "sum", "float32")
Found = Callable[[nn.Module, str, Path], float]
"""Returns the value of the rows of table t in the collection that a prefix means."""

pytestmark = pytest.mark.usefixtures("one_rank")


def collection(value: float) -> EmbeddingBagCollection:
    made = pooled.collection([("t", 6, 4, ["f"], PoolingType.SUM)])
    with torch.no_grad():
        made.embedding_bags["t"].weight.fill_(value)
    return made


def two() -> nn.Module:
    return nn.ModuleDict(
        {
            "a": nn.ModuleDict({"ebc": collection(1)}),
            "b": nn.ModuleDict({"inner": nn.Sequential(collection(2)), "over": nn.Linear(4, 1)}),
        }
    )


def of_source(source: object, prefix: str) -> float:
    tables = None if isinstance(source, nn.Module) else [TABLE]
    return float(make_source(source, tables, prefix, None, ()).rows["t"].read(0, 1)[0, 0])


def live(model: nn.Module, prefix: str, folder: Path) -> float:
    return of_source(model, prefix)


def state_dict(model: nn.Module, prefix: str, folder: Path) -> float:
    return of_source(model.state_dict(), prefix)


def torch_file(model: nn.Module, prefix: str, folder: Path) -> float:
    torch.save(model.state_dict(), folder / "c.pt")
    return of_source(folder / "c.pt", prefix)


def safetensors_file(model: nn.Module, prefix: str, folder: Path) -> float:
    save_file(model.state_dict(), folder / "c.safetensors")
    return of_source(folder / "c.safetensors", prefix)


def safetensors_folder(model: nn.Module, prefix: str, folder: Path) -> float:
    for number, (key, tensor) in enumerate(model.state_dict().items()):
        save_file({key: tensor}, folder / f"{number}.safetensors")
    return of_source(folder, prefix)


def dcp_folder(model: nn.Module, prefix: str, folder: Path) -> float:
    dcp.save(model.state_dict(), checkpoint_id=folder / "c")
    return of_source(folder / "c", prefix)


def sharded(model: nn.Module, prefix: str, folder: Path) -> float:
    rows = {key: float(tensor[0, 0]) for key, tensor in model.state_dict().items() if "bags" in key}
    # Sharding initialises the rows again, so they are read before.
    dmp = DistributedModelParallel(model, device=torch.device("cpu"))
    path = describe_sharded(dmp, prefix)[2]
    return rows[f"{path}.embedding_bags.t.weight".lstrip(".")]


KINDS = [live, state_dict, torch_file, safetensors_file, safetensors_folder, dcp_folder, sharded]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prefix", "value"),
    [("a.ebc", 1), ("a", 1), ("a.", 1), ("b.inner.0", 2), ("b.inner", 2), ("b", 2)],
)
def test_prefix_is_the_path_of_a_collection_or_its_parent(
    tmp_path: Path, kind: Found, prefix: str, value: float
) -> None:
    assert kind(two(), prefix, tmp_path) == value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("", "a.ebc, b.inner.0.* with prefix"),
        ("ebc", "under 'ebc'"),
        ("a.e", "under 'a.e'"),
        ("b.inner.0.embedding_bags", "under"),
        (".", "under '.'"),
    ],
)
def test_other_prefixes_are_rejected(
    tmp_path: Path, kind: Found, prefix: str, message: str
) -> None:
    with pytest.raises(InvalidModelError, match=message):
        kind(two(), prefix, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "."])
def test_dot_selects_the_top_level(tmp_path: Path, kind: Found, prefix: str) -> None:
    assert kind(collection(3), prefix, tmp_path) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_collection_at_a_path_takes_precedence_over_nested_collections(
    tmp_path: Path, kind: Found
) -> None:
    """Example: a collection inside another collection."""
    outer = nn.ModuleDict({"x": nn.ModuleDict({"y": collection(4)}), "x2": collection(5)})
    assert kind(outer, "x", tmp_path) == 4
    assert at_prefix(["x", "x.y", "x2"], "x") == ["x"]


@pytest.mark.parametrize("around", ["model", "state_dict"])
def test_wrapper_keys_are_part_of_the_path(tmp_path: Path, around: str) -> None:
    state = {around: two().state_dict()}
    torch.save(state, tmp_path / "c.pt")
    dcp.save(state, checkpoint_id=tmp_path / "c")
    for source in (state, tmp_path / "c.pt", tmp_path / "c"):
        assert of_source(source, f"{around}.b") == 2
        with pytest.raises(InvalidModelError, match="no key under 'b' ends in"):
            of_source(source, "b")
    for path in (tmp_path / "c.pt", tmp_path / "c"):
        assert f"prefix {around}.a.ebc\n" in draft_description(open_checkpoint(path), f"{around}.a")
