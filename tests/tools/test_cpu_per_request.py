"""Tests of the way of a request through the server, as bench/cpu_per_request.py traces it."""

import asyncio

import pytest
from cpu_per_request import WAYS, walk

WALKS_MAX = {
    "JSON": (13, 50),
    "protobuf": (13, 50),
    "gRPC": (14, 50),
    "infer JSON": (21, 110),
    "infer binary": (22, 70),
    "infer gRPC": (21, 75),
    "predict": (20, 120),
}
"""Files and calls of one request, at most: a reader has to follow them."""


@pytest.mark.parametrize("name", WAYS)
def test_requests_pass_few_files_and_calls(name: str) -> None:
    calls = asyncio.run(walk(name))
    files = sorted({file for file, _ in calls})
    files_max, calls_max = WALKS_MAX[name]
    assert files[-1].startswith("wire/")
    assert len(files) <= files_max, files
    assert len(calls) <= calls_max, calls
