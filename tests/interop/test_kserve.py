"""Tests of KServe's InferenceRESTClient and InferenceGRPCClient: results equal /embed's.

They are equal bit for bit. Installing the clients takes a minute and 320 MB.
"""

from __future__ import annotations

from typing import Any

import pytest
from interop.drivers import told_by_python
from interop.lookups import (
    DIMS,
    MODEL,
    WRONG,
    WRONG_FIELD,
    Lookup,
    assert_outputs,
    large_answer,
    lookups,
)
from running_servers import Running

pytestmark = pytest.mark.soak


def asked() -> list[Lookup]:
    return [*lookups(6), large_answer()]


@pytest.fixture(scope="module")
def told(server: Running) -> dict[str, Any]:
    """Runs KServe's clients once, and returns all that they received."""
    given = {
        "http": server.http,
        "grpc": server.grpc,
        "model": MODEL,
        "asked": [as_asked(one, at) for at, one in enumerate(asked())],
        "wrong": as_asked(WRONG, 0),
    }
    return told_by_python("kserve", given)


def as_asked(one: Lookup, at: int) -> dict[str, Any]:
    return {"bags": one.bags, "id": f"request {at}"}


@pytest.mark.parametrize("form", ["REST, JSON", "REST, binary", "gRPC, typed", "gRPC, raw"])
def test_every_form_is_answered_as_embed_is(told: dict[str, Any], form: str) -> None:
    answers = told[form.partition(",")[0]]["answers"][form]
    for at, (answer, one) in enumerate(zip(answers, asked(), strict=True)):
        version = "1" if form.startswith("gRPC") else None  # KServe's REST client drops it
        assert (answer["model"], answer["version"]) == (MODEL, version)
        assert answer["id"] == f"request {at}"
        assert list(answer["outputs"]) == list(DIMS)
        assert_outputs(answer["outputs"], one.by_feature)


@pytest.mark.parametrize("protocol", ["REST", "gRPC"])
def test_readiness_and_errors(told: dict[str, Any], protocol: str) -> None:
    assert told[protocol]["ready"] == [True, True, True, False]
    assert WRONG_FIELD in told[protocol]["error"]
