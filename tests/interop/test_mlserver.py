"""Tests of MLServer's `mlserver infer`, and of its types over its gRPC stub.

Results equal /embed's bit for bit.
"""

from typing import Any

import pytest
from interop.drivers import run_python_client
from interop.lookups import DIMS, MODEL, assert_outputs, lookups
from running_servers import Running

pytestmark = pytest.mark.soak
LOOKUPS = {f"request {at}": one for at, one in enumerate(lookups(6))}


@pytest.fixture(scope="module")
def received(server: Running) -> dict[str, Any]:
    """Runs MLServer's clients once, and returns all that they received."""
    parameters = {
        "http": server.http.removeprefix("http://"),
        "grpc": server.grpc,
        "model": MODEL,
        "requests": [{"bags": one.bags, "id": name} for name, one in LOOKUPS.items()],
    }
    return run_python_client("mlserver", parameters)


@pytest.mark.parametrize("client_kind", ["command", "stub"])
def test_every_client_gets_the_result_of_embed(received: dict[str, Any], client_kind: str) -> None:
    assert {response["id"] for response in received[client_kind]} == set(LOOKUPS)
    for response in received[client_kind]:
        assert response["model"] == MODEL
        assert list(response["outputs"]) == list(DIMS)
        assert_outputs(response["outputs"], LOOKUPS[response["id"]].by_feature)
