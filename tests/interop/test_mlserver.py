"""Tests of MLServer's `mlserver infer`, and of its types over its gRPC stub.

Results equal /embed's bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
from interop.drivers import told_by_python
from interop.lookups import DIMS, MODEL, assert_outputs, lookups
from running_servers import Running

pytestmark = pytest.mark.soak
ASKED = {f"request {at}": one for at, one in enumerate(lookups(6))}


@pytest.fixture(scope="module")
def told(server: Running) -> dict[str, Any]:
    """Runs MLServer's clients once, and returns all that they received."""
    given = {
        "http": server.http.removeprefix("http://"),
        "grpc": server.grpc,
        "model": MODEL,
        "asked": [{"bags": one.bags, "id": name} for name, one in ASKED.items()],
    }
    return told_by_python("mlserver", given)


@pytest.mark.parametrize("way", ["command", "stub"])
def test_it_is_answered_as_embed_is(told: dict[str, Any], way: str) -> None:
    assert {answer["id"] for answer in told[way]} == set(ASKED)
    for answer in told[way]:
        assert answer["model"] == MODEL
        assert list(answer["outputs"]) == list(DIMS)
        assert_outputs(answer["outputs"], ASKED[answer["id"]].by_feature)
