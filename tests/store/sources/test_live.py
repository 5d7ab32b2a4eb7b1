"""Tests of a live collection: its description is exact, or the error names what is not
supported."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store.conftest import MakeEbc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from unpooled import unpooled_collection

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import FROM_TRAINING, Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.write_expected import write_expected
from embedserve_store.sources import live


def test_tables_are_described_in_order(ebc: EmbeddingBagCollection) -> None:
    assert live.describe(ebc) == (
        TableSpec("user", 300, 16, ("user", "friend"), "sum", "float32"),
        TableSpec("item", 77, 8, ("item",), "mean", "float32"),
        TableSpec("tag", 16, 4, ("tag", "item"), "sum", "float32"),
    )


@pytest.fixture
def ec() -> EmbeddingCollection:
    return unpooled_collection(
        [("word", 12, ["word", "word_2"]), ("place", 5, ["place", "place_2"])]
    )


def test_embedding_collection_tables_are_unpooled(ec: EmbeddingCollection) -> None:
    assert live.describe(ec) == (
        TableSpec("word", 12, 32, ("word", "word_2"), "none", "float32"),
        TableSpec("place", 5, 32, ("place", "place_2"), "none", "float32"),
    )


def test_weights_equal_the_rows_of_the_module(make_ebc: MakeEbc, ec: EmbeddingCollection) -> None:
    half = make_ebc(half=True)
    rows = live.weights_of(half)
    assert list(rows) == ["user", "item", "tag"]
    assert rows["user"].dtype == "float16"
    assert torch.equal(rows["user"].read(7, 20), half.embedding_bags["user"].weight[7:20])
    found = live.weights_of(ec)["place"]
    assert torch.equal(found.gather(np.array([4, 0])), ec.embeddings["place"].weight[[4, 0]])
    assert not found.read(0, 5).requires_grad


def test_manifest_keys_equal_the_keys_of_the_module(ebc: EmbeddingBagCollection) -> None:
    manifest = Manifest("m", 1, live.describe(ebc), is_weighted=False)
    assert list(manifest.keys) == ["user", "friend", "item@item", "tag", "item@tag"]
    assert list(manifest.keys) == ebc._embedding_names


def test_results_equal_those_of_the_module(ebc: EmbeddingBagCollection) -> None:
    manifest = Manifest("m", 1, live.describe(ebc), is_weighted=False)
    answers = live.answers(ebc, manifest, sample_bags(manifest, {}))
    rows = ebc.embedding_bags["user"].weight.detach().numpy()
    np.testing.assert_allclose(answers[0, :16], rows[0] + rows[299], rtol=1e-6)
    assert not answers[1].any()


def test_only_float32_modules_without_weighted_means_compute_goldens(make_ebc: MakeEbc) -> None:
    assert live.can_answer(make_ebc())
    assert live.can_answer(make_ebc(is_weighted=True, pooling="sum"))
    assert not live.can_answer(make_ebc(is_weighted=True))
    assert not live.can_answer(make_ebc(half=True))


class ShardedEmbeddingBagCollection(torch.nn.Module):
    """A module with the name of torchrec's class."""


def quantized() -> QuantEmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="user", num_embeddings=8, embedding_dim=4, feature_names=["f"], data_type=DataType.INT8
    )
    return QuantEmbeddingBagCollection([config], is_weighted=False, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ([], "EmbeddingBagCollection or EmbeddingCollection, found list$"),
        (torch.nn.EmbeddingBag(4, 4), "found EmbeddingBag$"),
        (ShardedEmbeddingBagCollection(), "found ShardedEmbeddingBagCollection; it is sharded"),
        (quantized(), r"found torchrec\.quant\.embedding_modules\.\w+: publish the collection"),
        (torch.nn.Sequential(quantized()), r"quant\.embedding_modules\.\w+ at 0: publish the coll"),
    ],
)
def test_other_objects_are_rejected(thing: Any, message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        live.collection_in(thing)


def test_error_for_several_collections_names_them(ebc: EmbeddingBagCollection) -> None:
    assert live.collection_in(torch.nn.ModuleDict({"sparse": torch.nn.Sequential(ebc)})) is ebc
    model = torch.nn.ModuleDict({"sparse": torch.nn.Sequential(ebc), "more": copy.copy(ebc)})
    with pytest.raises(
        InvalidModelError, match=r"found ModuleDict; it has one at sparse\.0, more:"
    ):
        live.collection_in(model)
    assert live.collection_in(model, "sparse") is ebc


def test_collection_with_generated_weights_is_rejected() -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["t"])
    inner = EmbeddingBagCollection(tables=[config], is_weighted=True)
    processor = PositionWeightedModuleCollection({"t": 5})
    model = FeatureProcessedEmbeddingBagCollection(inner, processor)
    with pytest.raises(InvalidModelError, match=r"inside a FeatureProcessed.*changes ids"):
        live.collection_in(model)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_tables_that_fsdp_shards_are_rejected(tmp_path: Path) -> None:
    by_tensor, flat = (torch.nn.Sequential(one_table()) for _ in range(2))
    fully_shard(by_tensor, mesh=init_device_mesh("cpu", (1,)))
    flattened = FullyShardedDataParallel(flat, device_id=torch.device("cpu"))
    for module, kind in ((by_tensor, "DTensor"), (flattened, "Tensor")):
        message = f"table 't': its weight is a {kind} of shape .* save the model with torch.dist"
        with pytest.raises(InvalidModelError, match=message):
            write_expected(module, tmp_path / "e.safetensors")
        with pytest.raises(InvalidModelError, match=message):
            publish(module, tmp_path, model="m")


def one_table(**settings: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t", num_embeddings=8, embedding_dim=4, feature_names=["t"], **settings
            )
        ]
    )


@pytest.mark.parametrize(
    "setting", [{"need_pos": True}, {"num_embeddings_post_pruning": 4}, {"total_num_buckets": 2}]
)
def test_settings_that_change_no_lookup_are_published(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    """The publisher compares the rows with the module's own results."""
    published = publish(one_table(**setting), tmp_path, model="m")
    assert published.manifest.source["goldens"] == FROM_TRAINING
    assert published.manifest.tables[0].num_embeddings == 8


def test_table_of_rows_by_id_is_rejected() -> None:
    with pytest.raises(InvalidModelError, match="table 't': use_virtual_table is True"):
        live.describe(one_table(use_virtual_table=True))
