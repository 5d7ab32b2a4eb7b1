"""Tests of sharded models: their description is that of the unsharded model, and their ranks save
the tables."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from pooled import collection
from safetensors.torch import load_file
from server.python import run_warm_python
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from unpooled import unpooled_collection

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.manifest import FROM_TRAINING, Manifest
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.expected import Expected, read_expected
from embedserve_store.goldens.reference_pooling import pool
from embedserve_store.local_store import LocalStore
from embedserve_store.parts.part import Part
from embedserve_store.plans.plan import Shard
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.publish_sharded import publish_sharded
from embedserve_store.publishing.write_expected import write_expected
from embedserve_store.sources.checkpoint import find_tables, from_state_dict, open_checkpoint
from embedserve_store.sources.live_dmp import describe_sharded, plan_of, save_tables
from embedserve_store.verification import verify

USER = TableSpec("user", 30, 8, ("user", "friend"), "sum", "float32")
ITEM = TableSpec("item", 20, 4, ("item",), "mean", "float32")
WORD = TableSpec("word", 12, 32, ("word",), "none", "float32")
TIMEOUT_S = 300

pytestmark = pytest.mark.usefixtures("one_rank")


def bags(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    made = collection(
        [
            ("user", 30, 8, ["user", "friend"], PoolingType.SUM),
            ("item", 20, 4, ["item"], PoolingType.MEAN),
        ]
    )
    return EmbeddingBagCollection(made.embedding_bag_configs(), is_weighted)


def words() -> EmbeddingCollection:
    return unpooled_collection([("word", 12, ["word"])])


def sharded(module: nn.Module) -> DistributedModelParallel:
    return DistributedModelParallel(module, device=torch.device("cpu"))


def test_sharded_collection_is_described_with_its_key_path() -> None:
    model = sharded(nn.ModuleDict({"sparse": nn.Sequential(bags()), "over": nn.Linear(4, 1)}))
    assert describe_sharded(model) == ((USER, ITEM), False, "sparse.0")
    assert "sparse.0.embedding_bags.user.weight" in model.state_dict()


def test_weighted_collection_and_sharded_module_are_described() -> None:
    model = sharded(bags(is_weighted=True))
    assert describe_sharded(model) == ((USER, ITEM), True, "")
    assert describe_sharded(model.module) == ((USER, ITEM), True, "")


def test_prefix_selects_a_collection_and_its_absence_is_an_error() -> None:
    model = sharded(nn.ModuleDict({"a": bags(), "b": nn.ModuleDict({"ec": words()})}))
    assert describe_sharded(model, "b") == ((WORD,), False, "b.ec")
    assert describe_sharded(model, "a")[0] == (USER, ITEM)
    with pytest.raises(InvalidModelError, match=r"has 2 sharded .*, at a, b\.ec: choose one"):
        describe_sharded(model)
    with pytest.raises(
        InvalidModelError, match=r"no sharded .* under 'c', but at a, b\.ec: choose"
    ):
        describe_sharded(model, "c")


def test_sharded_model_in_another_module_is_published(tmp_path: Path) -> None:
    """The state dict of a module around a DistributedModelParallel does not name its wrappers."""
    dmp = sharded(nn.ModuleDict({"ebc": bags(), "over": nn.Linear(4, 1)}))
    outer = nn.ModuleDict({"inner": dmp})
    write_expected(outer, tmp_path / "e.safetensors", rows="all")
    assert set(read_expected(tmp_path / "e.safetensors").checksums) == {"user", "item"}
    publish_sharded(outer, tmp_path, model="m", expected=tmp_path / "e.safetensors")
    stored = LocalStore(tmp_path).load("m").tables.rows("user").view(np.float32)
    assert np.array_equal(stored, dmp.state_dict()["ebc.embedding_bags.user.weight"].numpy())


def test_model_without_sharded_tables_is_rejected() -> None:
    with pytest.raises(InvalidModelError, match=r"^Linear has no sharded EmbeddingBagCollections"):
        describe_sharded(nn.Linear(2, 2))
    with pytest.raises(InvalidModelError, match="has no sharded"):
        describe_sharded(bags())


def test_collection_with_generated_weights_is_rejected() -> None:
    processor = PositionWeightedModuleCollection(dict.fromkeys(("user", "friend", "item"), 5))
    model = sharded(
        nn.ModuleDict(
            {"fp": FeatureProcessedEmbeddingBagCollection(bags(is_weighted=True), processor)}
        )
    )
    with pytest.raises(InvalidModelError, match=r"inside a ShardedFeatureProcessed.*changes ids"):
        describe_sharded(model)


def test_only_tables_are_saved(tmp_path: Path) -> None:
    model = sharded(nn.ModuleDict({"a": bags(), "b": words(), "over": nn.Linear(4, 1)}))
    state = model.state_dict()
    for path, tables in (("a", (USER, ITEM)), ("b", (WORD,))):
        save_tables(model, tmp_path / path, path)
        rows, skipped = find_tables(open_checkpoint(tmp_path / path), tables, path)
        assert skipped == ()
        for table in tables:
            kind = "embedding_bags" if path == "a" else "embeddings"
            value = state[f"{path}.{kind}.{table.name}.weight"]
            local = value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value
            assert torch.equal(rows[table.name].read(0, table.num_embeddings), local)


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_state_dict_with_shards_of_one_rank_is_rejected_with_advice(tmp_path: Path) -> None:
    state = sharded(nn.ModuleDict({"ec": words()})).state_dict()
    with pytest.raises(InvalidModelError, match=r"save sharded tables with torch\.distributed"):
        find_tables(from_state_dict(state), (WORD,))
    torch.save(state, tmp_path / "s.pt")
    with pytest.raises(StoreError, match=r"ShardedTensor, .* save with torch\.distributed\.check"):
        open_checkpoint(tmp_path / "s.pt")


def test_distributed_tensors_of_one_rank_are_rejected_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchRec's have shards of their own. Those of FSDP are rejected before their module is
    imported, as in the command line."""
    save_again = r"one rank's part .* save with torch\.distributed\.checkpoint$"
    rows = torch.ones(12, 32)
    torch.save({"t": LocalShardsWrapper([rows], [(0, 0)])}, tmp_path / "shards.pt")
    with pytest.raises(StoreError, match=f"LocalShardsWrapper, {save_again}"):
        open_checkpoint(tmp_path / "shards.pt")
    torch.save({"t": distribute_tensor(rows, init_device_mesh("cpu", (1,)))}, tmp_path / "d.pt")
    monkeypatch.setattr("torch._weights_only_unpickler._marked_safe_globals_set", set())
    with pytest.raises(StoreError, match=f"DTensor, {save_again}"):
        open_checkpoint(tmp_path / "d.pt")


def test_ranks_save_and_publish_their_shards_collectively(tmp_path: Path) -> None:
    script = Path(__file__).with_name("sharded_saver.py")
    done = run_warm_python(script, tmp_path, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    gathered = torch.load(tmp_path / "gathered.pt", weights_only=True)
    tables = torch.load(tmp_path / "described.pt", weights_only=True)
    assert [table[0] for table in tables] == ["user", "item", "tag", "country", "device"]
    specs = [TableSpec(*table) for table in tables]
    rows, skipped = find_tables(open_checkpoint(tmp_path / "tables"), specs, "sparse.ebc")
    assert skipped == ()
    for name, found in rows.items():
        whole = gathered[f"sparse.ebc.embedding_bags.{name}.weight"]
        assert torch.equal(found.read(0, found.shape[0]), whole)
    version = LocalStore(tmp_path / "store").load("m")
    for name, found in rows.items():
        stored = version.tables.rows(name).view(np.float32)
        assert np.array_equal(stored, found.read(0, found.shape[0]).numpy())
    check_expected(tmp_path, specs)
    own = LocalStore(tmp_path / "store").load("own").plan
    assert {name: table.sharding_type for name, table in own.tables.items()} == trainer.SHARDING
    assert {name: one.sharding_types for name, one in own.constraints.items()} == {
        name: (kind,) for name, kind in trainer.SHARDING.items()
    }
    assert own.world_size == 2
    assert own.tables["user"].shards == (Shard(0, 0, 52, 0, 16), Shard(1, 52, 51, 0, 16))
    assert [shard.rank for shard in own.tables["country"].shards] == [0, 1]
    wider = LocalStore(tmp_path / "store").load("wider").plan
    assert wider.world_size == 3
    assert {name: table.sharding_type for name, table in wider.tables.items()} == trainer.SHARDING
    expected_error = "table 'user': dtype is 'int2', expected one of float32, float16, int8, int4"
    assert (tmp_path / "outcome-0").read_text() == f"1\n{expected_error}"
    assert (tmp_path / "outcome-1").read_text() == f"none\n{expected_error}"
    assert os.listdir(tmp_path / "store" / "m") == ["1"]


def check_expected(folder: Path, tables: list[TableSpec]) -> None:
    """Checks that the ranks wrote the results of their checkpoint, as its description pools it."""
    options: dict[str, Any] = {"model": "expected", "expected": folder / "expected.safetensors"}
    state = torch.load(folder / "gathered.pt", weights_only=True)
    publish(state, folder / "store", tables=tables, **options)
    version = LocalStore(folder / "store").load("expected")
    assert version.manifest.source["goldens"] == FROM_TRAINING
    goldens = version.goldens()
    assert np.array_equal(goldens.source_answers, read_expected(options["expected"]).answers)
    assert version.manifest.source["compared"]["rows"] == {
        table.name: table.num_embeddings for table in tables
    }
    for table in tables:  # row-wise, column-wise, whole and on every rank
        key = f"sparse.ebc.embedding_bags.{table.name}.weight"
        wrong = state | {key: state[key].clone()}
        wrong[key][5, -1] += wrong[key][5, -1] * 1e-6  # too little for the sampled results
        with pytest.raises(InvalidModelError, match=f"row 5 of table '{table.name}' is not the"):
            publish(wrong, folder / "store", tables=tables, **options)
    mean = [replace(table, pooling="mean") if table.name == "tag" else table for table in tables]
    with pytest.raises(InvalidModelError, match=r"key 'tag' .* those of table 'tag', pooling sum"):
        publish(state, folder / "store", tables=mean, **options)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_dim_that_only_the_dense_kernel_supports_is_published(tmp_path: Path, dtype: str) -> None:
    dmp = sharded(nn.ModuleDict({"ebc": collection([("t", 30, 10, ["f"], PoolingType.SUM)])}))
    publish_sharded(dmp, tmp_path, model="m", dtype=dtype)
    version = LocalStore(tmp_path).load("m")
    verify(version)
    assert version.manifest.length_per_key == (10,)
    assert version.plan.tables["t"].shards == (Shard(0, 0, 30, 0, 10),)
    rows = dequantize_rows(version.tables.rows("t"), dtype, 10)
    trained = dmp.state_dict()["ebc.embedding_bags.t.weight"].detach().numpy()
    assert np.abs(rows - trained).max() <= {"float32": 0}.get(dtype, 0.05) * np.ptp(trained)


def test_sharded_model_is_published_for_several_hosts(tmp_path: Path) -> None:
    dmp = sharded(nn.ModuleDict({"ebc": collection([("t", 30, 8, ["f"], PoolingType.SUM)])}))
    publish_sharded(dmp, tmp_path, model="m", sharding="row_wise", hosts=4)
    for number, rows in enumerate((7, 8, 7, 8)):
        version = LocalStore(tmp_path, Part(number, 4)).load("m")
        verify(version)
        assert version.manifest.rows_per_feature == (rows,)
    with pytest.raises(InvalidModelError, match="hosts is 31, but part 1 would have no rows"):
        publish_sharded(dmp, tmp_path, model="m", sharding="row_wise", hosts=31)


@pytest.mark.parametrize(
    ("types", "is_weighted", "wrong"),
    [
        (
            {"user": "table_wise", "item": "row_wise"},
            False,
            "'user' .* pooling sum: .*, pooling mean",
        ),
        ({"user": "row_wise", "item": "row_wise"}, True, "'item' .* pooling mean: "),
    ],
    ids=["sum beside a row-wise mean", "weighted row-wise mean"],
)
def test_model_that_pools_in_another_way_than_its_tables_say_is_rejected(
    tmp_path: Path, types: dict[str, str], is_weighted: bool, wrong: str
) -> None:
    """TorchRec divides by the lengths of bags beside a row-wise mean, and that by its weights."""
    model = nn.ModuleDict({"ebc": bags(is_weighted=is_weighted)})
    dmp = trainer.shard_model(model, types)
    with pytest.raises(InvalidModelError, match=rf"key {wrong}"):
        publish_sharded(dmp, tmp_path, model="m")
    assert not (tmp_path / "m").exists()


def test_torch_writes_one_shard_of_a_rank_as_safetensors(tmp_path: Path) -> None:
    """Hence docs/troubleshooting.md says to save column-wise tables in another format."""
    model = nn.ModuleDict({"ebc": bags()})
    dmp = trainer.shard_model(model, {"user": "column_wise", "item": "table_wise"})
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(dmp.state_dict(), storage_writer=writer)
    (file,) = tmp_path.glob("*.safetensors")
    shapes = {name: rows.shape for name, rows in load_file(file).items()}
    assert shapes["ebc.embedding_bags.item.weight"] == (20, 4)
    assert shapes["ebc.embedding_bags.user.weight"] == (30, 4), "the other four columns are lost"


def test_diverged_model_is_rejected(tmp_path: Path) -> None:
    dmp = sharded(nn.ModuleDict({"ebc": bags()}))
    dmp.state_dict()["ebc.embedding_bags.item.weight"].data[:] = float("nan")
    with pytest.raises(InvalidModelError, match="the vectors of 'item' hold nan: a row is not"):
        publish_sharded(dmp, tmp_path, model="m")
    assert not (tmp_path / "m").exists()


def test_url_is_rejected_before_anything_is_saved() -> None:
    with pytest.raises(InvalidModelError, match=r"s3://b/store: the ranks save their shards in"):
        publish_sharded(sharded(nn.ModuleDict({"ec": words()})), "s3://b/store", model="m")


def test_unsupported_training_sharding_needs_a_sharding_argument() -> None:
    dmp = sharded(nn.ModuleDict({"ec": words()}))
    (collection,) = (one for one in dmp.modules() if hasattr(one, "module_sharding_plan"))
    collection.module_sharding_plan["word"].sharding_type = "table_row_wise"
    with pytest.raises(
        InvalidModelError, match=r"'word': table_row_wise shards .* sharding='row_wise'"
    ):
        plan_of(dmp)


def batch(keys: list[str]) -> KeyedJaggedTensor:
    """Returns one example: a bag with row i for the i-th of ``keys``."""
    ones = torch.ones(len(keys), dtype=torch.int32)
    return KeyedJaggedTensor(keys=keys, values=torch.arange(len(keys)), lengths=ones)


KEYS = list(trainer.FEATURES)


@pytest.mark.parametrize("keys", [KEYS, KEYS[::-1], ["x", *KEYS[2:], *KEYS[:2]]])
@pytest.mark.parametrize("is_first", [False, True], ids=["after training", "before training"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_publishing_leaves_the_training_unchanged(
    tmp_path: Path, keys: list[str], is_first: bool
) -> None:
    dmp, apart = (trainer.shard("float32") for _ in range(2))
    apart.load_state_dict(dmp.state_dict())

    def look_up(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
        answers: dict[str, torch.Tensor] = model.module.sparse["ebc"](batch(keys)).to_dict()
        return answers

    def counts() -> list[tuple[int, ...]]:
        lookups = dmp.module.sparse["ebc"]._lookups
        modules = [module for lookup in lookups for module in lookup.modules()]
        kernels = [module for module in modules if hasattr(module, "iter_cpu")]
        return [tuple(int(getattr(k, n)) for n in ("iter", "iter_cpu", "step")) for k in kernels]

    if not is_first:
        look_up(dmp)
    before = counts()
    assert before
    write_expected(dmp, tmp_path / "e.safetensors")
    assert counts() == before
    check_pooled(read_expected(tmp_path / "e.safetensors"), dmp)
    for feature, values in look_up(apart).items():
        assert torch.equal(look_up(dmp)[feature], values)


@pytest.mark.parametrize("is_first", [False, True], ids=["after training", "before training"])
def test_batch_sizes_of_training_may_vary_by_feature(tmp_path: Path, is_first: bool) -> None:
    """TorchRec exchanges results in another way if they do, and learns that from the first batch.
    The expected results have one batch size."""
    tables = [
        ("user", 30, 8, ["user"], PoolingType.SUM),
        ("item", 20, 8, ["item"], PoolingType.SUM),
    ]
    model = nn.ModuleDict({"ebc": collection(tables)})
    types = {"user": "row_wise", "item": "table_wise"}
    dmp = trainer.shard_model(model, types, EmbOptimType.EXACT_SGD)

    def look_up() -> torch.Tensor:
        features = KeyedJaggedTensor(
            keys=["user", "item"],
            values=torch.arange(4),
            lengths=torch.tensor([1, 1, 2]),
            stride_per_key_per_rank=[[2], [1]],
            inverse_indices=(["user", "item"], torch.tensor([[0, 1, 1], [0, 0, 0]])),
        )
        values: torch.Tensor = dmp.module["ebc"](features).wait().values()
        return values

    if not is_first:
        look_up()
    publish_sharded(dmp, tmp_path, model="m")
    assert look_up().shape == (3, 16)


def check_pooled(expected: Expected, dmp: DistributedModelParallel) -> None:
    """Checks that the results are the sums and means of the tables' rows."""
    whole = trainer.gathered(dmp, 0)
    tables, _, path = describe_sharded(dmp)

    def rows_of(table: TableSpec, numbers: np.ndarray) -> np.ndarray:
        rows: np.ndarray = whole[f"{path}.embedding_bags.{table.name}.weight"].numpy()[numbers]
        return rows

    manifest = Manifest("m", 1, tables, False)
    answers = pool(manifest, expected.bags, expected.bags.ids, rows_of)
    np.testing.assert_allclose(expected.answers, answers, rtol=1e-5, atol=1e-7)
