"""MLServer's `mlserver infer`, and its types over its gRPC stub: what they are answered is what
/embed answers, to the bit."""

from __future__ import annotations

import base64
import json
import subprocess
from typing import Any

import numpy as np
import pytest
from interop.drivers import HERE, python_programs
from interop.lookups import DIMS, MODEL, lookups
from running_servers import Running

pytestmark = pytest.mark.soak
CLIENT_S_MAX = 120
ASKED = {f"request {at}": one for at, one in enumerate(lookups(6))}


@pytest.fixture(scope="module")
def told(server: Running) -> dict[str, Any]:
    """What the clients were told of all that they asked."""
    python = python_programs("mlserver") / "python"
    given = {
        "http": server.http.removeprefix("http://"),
        "grpc": server.grpc,
        "model": MODEL,
        "asked": [{"bags": one.bags, "id": name} for name, one in ASKED.items()],
    }
    done = subprocess.run(
        [str(python), str(HERE / "mlserver" / "client.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=CLIENT_S_MAX,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("way", ["command", "stub"])
def test_it_is_answered_as_embed_is(told: dict[str, Any], way: str) -> None:
    assert {answer["id"] for answer in told[way]} == set(ASKED)
    for answer in told[way]:
        assert answer["model"] == MODEL
        values, start = ASKED[answer["id"]].values, 0
        assert list(answer["outputs"]) == list(DIMS)
        for name, dim in DIMS.items():
            expected = np.ascontiguousarray(values[:, start : start + dim])
            shape, encoded = answer["outputs"][name]
            assert tuple(shape) == expected.shape
            assert base64.b64decode(encoded) == expected.tobytes()
            start += dim
