"""Tests of the package: it imports no torch, accepts a str or a Path everywhere, and all its names
exist."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrec import EmbeddingBagCollection

import embedserve_store
import embedserve_store as store
import embedserve_store.publishing.publish
from embedserve_store.demo import build_demo, save_checkpoint
from embedserve_store.demo.labels import write_labels
from embedserve_store.remote.remote_store import RemoteStore
from embedserve_store.remote.upload import upload_version
from embedserve_store.sources import live
from embedserve_store.sources.checkpoint import open_checkpoint


def run(code: str) -> str:
    root = str(Path(embedserve_store.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True).stdout.decode()


def test_importing_does_not_import_torch_or_numpy() -> None:
    heavy = "{'torch', 'torchrec', 'fbgemm_gpu', 'numpy', 'yaml'} & set(sys.modules)"
    assert run(f"import sys, embedserve_store; print({heavy})") == "set()\n"


def test_loading_does_not_import_torch(version: embedserve_store.ModelVersion) -> None:
    store = str(version.path.parent.parent)
    code = (
        "import sys; from embedserve_store import ModelStore, verify\n"
        f"version = ModelStore({store!r}).load('m'); verify(version)\n"
        "print(version.manifest.version, 'torch' in sys.modules)"
    )
    assert run(code) == "1 False\n"


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_may_be_str_or_path_everywhere(
    kind: type[str] | type[Path], ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    def at(name: str) -> str | Path:
        return kind(tmp_path / name)

    torch.save(ebc.state_dict(), at("model.pt"))
    store.write_expected(ebc, at("expected"))
    (tmp_path / "own").write_text('{"user": {"min_partition": 16}}')
    (tmp_path / "ids.txt").write_text("\n".join(map(str, range(300))))
    published = store.publish(
        at("model.pt"),
        at("store"),
        model="m",
        tables=live.describe(ebc),
        vocabularies={"user": at("ids.txt")},
        constraints=store.read_constraints(at("own")),
        expected=at("expected"),
    )
    assert store.read_plan(at("store/m/1/plan.json")) == published.plan
    assert len(open_checkpoint(at("model.pt")).tensors) == 3
    url = f"file://{tmp_path}/remote"
    upload_version(at("store/m/1"), url)
    pulled = store.ModelStore(url, at("cache")).load("m")
    assert RemoteStore(url, at("cache")).load("m").path == pulled.path
    assert tmp_path / "cache" in pulled.path.parents
    store.set_alias(at("store"), "m", "stable", 1)
    store.add_note(at("store"), "m", 1, "good")
    assert list(store.ModelStore(at("store")).aliases("m")) == ["stable"]
    assert store.prune(at("store"), "m", keep=1) == []
    write_labels(at("store"), "m")
    save_checkpoint(ebc, at("again.pt"))
    with pytest.raises(store.StoreError, match="none does not exist"):
        build_demo(at("store"), checkpoint=at("none/demo.pt"))


def test_publish_is_the_function_not_its_module() -> None:
    assert callable(embedserve_store.publish)


def test_all_public_names_exist() -> None:
    for name in embedserve_store.__all__:
        assert getattr(embedserve_store, name) is not None
    assert not hasattr(embedserve_store, "another")
