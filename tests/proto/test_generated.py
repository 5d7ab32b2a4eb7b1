"""Tests that the committed code is protoc's output for the .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto"


@pytest.mark.parametrize("proto", ["embedding", "open_inference", "predictor"])
@pytest.mark.parametrize("ending", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_generated_code_is_current(proto: str, ending: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", "-I.", *outputs,
         f"embedserve_proto/{proto}.proto"],
        cwd=PROTO,
        check=True,
    )  # fmt: skip
    name = proto + ending
    generated = tmp_path / "embedserve_proto" / name
    committed = PROTO / "embedserve_proto" / name
    assert committed.read_text() == generated.read_text(), "run make proto and commit the result"
