"""KServe's InferenceRESTClient and InferenceGRPCClient: what they are answered is what /embed
answers, to the bit. Installing them takes a minute and 320 MB."""

from __future__ import annotations

import base64
import json
import subprocess
from typing import Any

import numpy as np
import pytest
from interop.drivers import HERE, python_programs
from interop.lookups import DIMS, MODEL, WRONG, WRONG_FIELD, Lookup, large_answer, lookups
from running_servers import Running

pytestmark = pytest.mark.soak
CLIENT_S_MAX = 120


def asked() -> list[Lookup]:
    return [*lookups(6), large_answer()]


@pytest.fixture(scope="module")
def told(server: Running) -> dict[str, Any]:
    """What the clients were told of all that they asked."""
    python = python_programs("kserve") / "python"
    given = {
        "http": server.http,
        "grpc": server.grpc,
        "model": MODEL,
        "asked": [as_asked(one, at) for at, one in enumerate(asked())],
        "wrong": as_asked(WRONG, 0),
    }
    done = subprocess.run(
        [str(python), str(HERE / "kserve" / "client.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=CLIENT_S_MAX,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def as_asked(one: Lookup, at: int) -> dict[str, Any]:
    return {"bags": one.bags, "id": f"request {at}"}


@pytest.mark.parametrize("form", ["REST, JSON", "REST, binary", "gRPC, typed", "gRPC, raw"])
def test_every_form_is_answered_as_embed_is(told: dict[str, Any], form: str) -> None:
    answers = told[form.partition(",")[0]]["answers"][form]
    for at, (answer, one) in enumerate(zip(answers, asked(), strict=True)):
        version = "1" if form.startswith("gRPC") else None  # which its REST client passes over
        assert (answer["model"], answer["version"]) == (MODEL, version)
        assert answer["id"] == f"request {at}"
        start = 0
        assert list(answer["outputs"]) == list(DIMS)
        for name, dim in DIMS.items():
            expected = np.ascontiguousarray(one.values[:, start : start + dim])
            shape, encoded = answer["outputs"][name]
            assert tuple(shape) == expected.shape
            assert base64.b64decode(encoded) == expected.tobytes()
            start += dim


@pytest.mark.parametrize("protocol", ["REST", "gRPC"])
def test_readiness_and_errors(told: dict[str, Any], protocol: str) -> None:
    assert told[protocol]["ready"] == [True, True, True, False]
    assert WRONG_FIELD in told[protocol]["error"]
