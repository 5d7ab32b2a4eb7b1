"""The package is light to import, and its names are what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import embedserve_store
import embedserve_store.publishing.publish


def run(code: str) -> str:
    root = str(Path(embedserve_store.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True).stdout.decode()


def test_importing_does_not_import_torch() -> None:
    heavy = "{'torch', 'torchrec', 'fbgemm_gpu', 'yaml'} & set(sys.modules)"
    assert run(f"import sys, embedserve_store; print({heavy})") == "set()\n"


def test_loading_does_not_import_torch(version: embedserve_store.ModelVersion) -> None:
    store = str(version.path.parent.parent)
    code = (
        "import sys; from embedserve_store import ModelStore, verify\n"
        f"version = ModelStore({store!r}).load('m'); verify(version)\n"
        "print(version.manifest.version, 'torch' in sys.modules)"
    )
    assert run(code) == "1 False\n"


def test_publish_is_the_function_and_not_its_module() -> None:
    assert callable(embedserve_store.publish)


def test_all_names_exist() -> None:
    for name in embedserve_store.__all__:
        assert getattr(embedserve_store, name) is not None
