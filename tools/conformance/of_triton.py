"""Checks which clauses of open_inference.py NVIDIA's Triton keeps. Where it does not, Triton
or the clause is wrong.

    python tools/conformance/of_triton.py          # after make bench-peers

Serves a model with the same tensors as embedserve's. Reports and exits like open_inference.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from running_servers import free_port, started, wait_until_ready
from servers.triton import Triton

HERE = Path(__file__).resolve().parent
MODEL = "shop"


def main() -> int:
    triton = Triton()
    if triton.missing():
        print(f"Triton is missing {triton.missing()}", file=sys.stderr)
        return 2
    http, grpc = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        words = triton.serve(repository(Path(folder) / "repository"), http, grpc)
        environment = os.environ | triton.environment()
        with started(words, log, is_warm=False, env=environment) as process:
            wait_until_ready(process, log, f"http://127.0.0.1:{http}", f"/v2/models/{MODEL}/ready")
            ports = ("--http", f"127.0.0.1:{http}", "--grpc", f"127.0.0.1:{grpc}")
            given = (*ports, "--model", MODEL, "--shared-memory", f"/{MODEL}-")
            return subprocess.run([sys.executable, HERE / "open_inference.py", *given]).returncode


def repository(folder: Path) -> Path:
    """Makes Triton's repository with the model, and returns its folder."""
    version = folder / MODEL / "1"
    version.mkdir(parents=True)
    shutil.copy(HERE / "triton" / "model.py", version)
    shutil.copy(HERE / "triton" / "config.pbtxt", version.parent)
    return folder


if __name__ == "__main__":
    sys.exit(main())
