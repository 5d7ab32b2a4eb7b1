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
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from running_servers import free_port
from servers.triton import Triton

HERE = Path(__file__).resolve().parent
MODEL = "shop"
READY_S_MAX = 120


def main() -> int:
    triton = Triton()
    if triton.missing():
        print(f"Triton is missing {triton.missing()}", file=sys.stderr)
        return 2
    http, grpc = free_port(), free_port()
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            triton.serve(repository(Path(folder)), http, grpc),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | triton.environment(),
        )
        try:
            wait_until_ready(process, f"http://127.0.0.1:{http}/v2/models/{MODEL}/ready")
            ports = ("--http", f"127.0.0.1:{http}", "--grpc", f"127.0.0.1:{grpc}")
            given = (*ports, "--model", MODEL, "--shared-memory", f"/{MODEL}-")
            return subprocess.run([sys.executable, HERE / "open_inference.py", *given]).returncode
        except TimeoutError:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            raise
        finally:
            process.terminate()
            process.wait()


def repository(folder: Path) -> Path:
    """Makes Triton's repository with the model, and returns its folder."""
    version = folder / MODEL / "1"
    version.mkdir(parents=True)
    shutil.copy(HERE / "triton" / "model.py", version)
    shutil.copy(HERE / "triton" / "config.pbtxt", version.parent)
    return folder


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + READY_S_MAX
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise TimeoutError("Triton is not ready")


if __name__ == "__main__":
    sys.exit(main())
