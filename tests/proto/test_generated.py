"""The committed code is what protoc makes of embedding.proto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto"


@pytest.mark.parametrize("name", ["embedding_pb2.py", "embedding_pb2.pyi", "embedding_pb2_grpc.py"])
def test_generated_code_is_current(name: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", "-I.", *outputs,
         "embedserve_proto/embedding.proto"],
        cwd=PROTO,
        check=True,
    )  # fmt: skip
    generated = tmp_path / "embedserve_proto" / name
    committed = PROTO / "embedserve_proto" / name
    assert committed.read_text() == generated.read_text(), "run make proto and commit the result"
