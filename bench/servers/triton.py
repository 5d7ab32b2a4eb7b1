"""NVIDIA's Triton Inference Server from the nvidia-pytriton wheel, on the CPU.

Uses only the wheel's tritonserver with its Python backend, not pytriton's Python layer.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
from workloads import CACHE, Request, Workload

from servers.base import HERE, Server, Way, environment_folder, is_installed, make_environment
from servers.open_inference import Tensor, infer_body, infer_headers, infer_values, infer_ways

SCRIPTS = HERE / "scripts"
# The wheel's Python stub is built for numpy 1. With numpy 2 it passes tensors with strides of 0.
PACKAGES = ("nvidia-pytriton==0.7.0", "torch==2.13.0", "numpy==1.26.4")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MODEL = "pooled"
LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"

CONFIG = """\
backend: "python"
max_batch_size: 64
input [
  {{ name: "bags" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }}
]
output [ {{ name: "values" data_type: TYPE_FP32 dims: [ -1, {width} ] }} ]
dynamic_batching {{ }}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
version_policy {{ specific {{ versions: [ {version} ] }} }}
"""


class Triton(Server):
    name = "Triton"
    ways = infer_ways(MODEL)

    def missing(self) -> str:
        return "" if is_installed("triton") else "its environment: make bench-peers"

    def install(self) -> None:
        make_environment("triton", *PACKAGES)
        wheel = _site_packages() / "pytriton" / "tritonserver"
        shutil.copytree(wheel / "backends", _backends(), dirs_exist_ok=True)
        # The backend searches for the interpreter's stub next to its own library.
        stub = Path("triton_python_backend_stub")
        shutil.copy2(wheel / "python_backend_stubs" / PYTHON / stub, _backends() / "python" / stub)

    def command(self, workload: Workload, port: int) -> list[str]:
        return self.serve(self._repository(workload), port, port + 1)

    def serve(self, repository: Path, http_port: int, grpc_port: int) -> list[str]:
        """Returns the command that serves the models of a repository."""
        return [
            str(_site_packages() / "pytriton" / "tritonserver" / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={_backends()}",
            "--http-address=127.0.0.1",
            f"--http-port={http_port}",
            "--http-thread-count=1",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={grpc_port}",
            "--allow-metrics=false",
            "--log-verbose=0",
            "--log-info=false",
            "--exit-timeout-secs=5",
        ]

    def environment(self) -> dict[str, str]:
        libraries = (_site_packages() / "nvidia_pytriton.libs", Path(sys.base_prefix) / "lib")
        return {
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "PYTHONHOME": sys.base_prefix,
            # The stub embeds Python, which uses the packages of the first python3 on PATH.
            "PATH": f"{environment_folder('triton') / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        return infer_body(way, MODEL, tensors_of(request))

    def headers(self, way: Way, body: bytes) -> dict[str, str]:
        return infer_headers(way, body)

    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        of_batch: np.ndarray = infer_values(way, answer)[0]  # the batch has one element
        return of_batch

    def _repository(self, workload: Workload) -> Path:
        """Creates a model repository for the workload's tables."""
        tables = workload.tables
        repository = CACHE / "triton" / tables.folder.name
        add_version(repository, 1)
        self.configure(repository, tables.folder, tables.count, tables.dim)
        return repository

    def configure(
        self, repository: Path, tables: Path, count: int, dim: int, version: int = 1
    ) -> None:
        """Writes the configuration that selects the served version and its tables."""
        config = CONFIG.format(width=count * dim, version=version)
        parameters = {"tables": tables, "count": count, "scripts": SCRIPTS}
        for name, value in parameters.items():
            config += f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'
        (repository / MODEL / "config.pbtxt").write_text(config)


def add_version(repository: Path, version: int) -> None:
    """Creates the version's folder with the model's script."""
    folder = repository / MODEL / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SCRIPTS / "triton_model.py", folder / "model.py")


def tensors_of(request: Request) -> list[Tensor]:
    """Returns one tensor with the number of examples, lengths and ids, behind a batch dimension of
    1; a single tensor costs Triton less than two."""
    head = np.append(request.examples, request.lengths.ravel())
    return [Tensor("bags", np.concatenate([head, request.ids]).astype("<i8")[None])]


def _site_packages() -> Path:
    return environment_folder("triton") / "lib" / f"python{PYTHON}" / "site-packages"


def _backends() -> Path:
    return environment_folder("triton") / "backends"
