"""Tests that the GPU tests are collected on a host with only PyTorch and the carried bundle."""

import os
import subprocess
import sys

from documents import ROOT

COLLECT_S_MAX = 300

BUNDLE = (
    *("fbgemm_gpu", "torchrec", "tensordict", "pyvers", "orjson", "importlib_metadata", "msgspec"),
    *("fastapi", "fastapi_offline", "starlette", "httptools", "hpack", "pydantic"),
    *("pydantic_core", "annotated_types", "annotated_doc", "typing_inspection"),
    *("opentelemetry_api", "grpcio", "protobuf", "grpcio_health_checking", "grpcio_reflection"),
)
"""Packages that the bundle carries: TorchRec, FBGEMM and the server's imports."""
HOST = (
    *("torch", "filelock", "typing_extensions", "setuptools", "sympy", "mpmath", "networkx"),
    *("jinja2", "markupsafe", "fsspec", "numpy", "pytest", "iniconfig", "packaging", "pluggy"),
    *("pygments", "safetensors", "pyyaml", "xxhash", "torchmetrics", "lightning_utilities", "tqdm"),
    *("pyre_extensions", "typing_inspect", "mypy_extensions", "cloudpickle"),
)
"""Packages of a GPU host: PyTorch, requirements of PyTorch and TorchRec, pytest, file readers."""
HERE = ("embedserve", "fbgemm_gpu_cpu")

COLLECT = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

allowed = set(sys.argv[1].split())
blocked = {
    module
    for module, names in packages_distributions().items()
    if not allowed.intersection(name.lower().replace("-", "_").replace(".", "_") for name in names)
}
assert {"hypothesis", "httpx", "uvloop", "prometheus_client"} <= blocked, blocked


class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            return None
        return super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
import pytest

options = "--collect-only -q -m gpu -p no:cacheprovider tests/engine"
sys.exit(pytest.main(options.split()))
"""


def test_gpu_tests_are_collected_without_packages_missing_on_gpu_hosts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, " ".join((*BUNDLE, *HOST, *HERE))],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=COLLECT_S_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for test in (
        "test_cuda_lookups_equal_stored_rows",
        "test_column_shards_on_one_gpu_equal_stored_columns",
    ):
        assert f"tests/engine/test_gpu.py::{test}" in done.stdout
    assert (
        "tests/engine/test_live_rows.py::test_live_lookups_equal_the_compacted_version[int4-cuda]"
        in done.stdout
    )
    assert (
        "tests/engine/test_live_ids.py::test_lookups_follow_added_and_removed_ids[cuda]"
        in done.stdout
    )
