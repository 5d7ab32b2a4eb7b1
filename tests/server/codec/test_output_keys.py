"""Tests of output keys over REST and gRPC: the response has the requested keys, as in the full
response."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import model_info, unpooled_info
from server.live import Live, live_server
from server.openapi import validate

from embedserve.batching.split import select_output_keys
from embedserve.batching.validation import check_output
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError
from embedserve.lookup_types import LookupResult, OutputOptions
from embedserve.model_info import SELECTIONS_MAX
from embedserve_proto import embedding_pb2 as pb

BAGS: Bags = {"tag": [[1], [2, 3], []], "user": [[4], [], [6]]}
IDS: dict[str, Any] = {"ids": [1, 2, 3, 4, 6], "lengths": [1, 2, 0, 1, 0, 1]}
COLUMNS = {"user": slice(0, 4), "movie": slice(4, 7), "tag": slice(7, 9)}
SELECTIONS = [("user",), ("tag", "user"), ("movie", "tag"), ("movie", "user"), ("tag",)]


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    limits = Limits(request_features_max=3)
    async with live_server(engine, FakeEngine(unpooled_info()), limits=limits) as live:
        yield live


def selected(engine: FakeEngine, keys: tuple[str, ...]) -> np.ndarray:
    whole = engine.expected(BAGS)
    return np.concatenate([whole[:, COLUMNS[key]] for key in COLUMNS if key in keys], axis=1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_openapi_describes_the_keys_of_requests_and_responses(live: Live, dtype: str) -> None:
    request = {"features": BAGS, "output_keys": ["tag", "user"], "output_dtype": dtype}
    described = (await live.http.get("/openapi.json")).json()
    validate(request, "EmbedRequest", described)
    response = (await live.http.post("/embed", json=request)).json()
    validate(response, "EmbedResponse", described)
    assert (response["keys"], response["length_per_key"]) == (["user", "tag"], [4, 2])


@pytest.mark.parametrize("keys", [(), ("tag", "movie", "user")])
async def test_all_or_no_output_keys_yield_the_default_response(
    live: Live, keys: tuple[str, ...]
) -> None:
    plain = await live.stub.Embed(pb.EmbedRequest(keys=["tag", "user"], **IDS))
    named = await live.stub.Embed(pb.EmbedRequest(keys=["tag", "user"], output_keys=keys, **IDS))
    assert named == plain
    json_plain = await live.http.post("/embed", json={"features": BAGS})
    json_named = await live.http.post("/embed", json={"features": BAGS, "output_keys": keys})
    assert json_named.content == json_plain.content


async def test_each_request_of_a_batch_has_its_own_output_keys(
    live: Live, engine: FakeEngine
) -> None:
    requested_keys = [("user",), (), ("tag",), ("user",)]
    requests = [
        pb.EmbedRequest(keys=["tag", "user"], output_keys=keys, **IDS) for keys in requested_keys
    ]
    responses = [answer async for answer in live.stub.EmbedStream(iter(requests))]
    for keys, answer in zip(requested_keys, responses, strict=True):
        assert answer.values == selected(engine, keys or tuple(COLUMNS)).tobytes()


@pytest.mark.parametrize("keys", SELECTIONS, ids=" ".join)
def test_chunked_result_stays_chunked_after_key_selection(
    engine: FakeEngine, keys: tuple[str, ...]
) -> None:
    whole = engine.expected(BAGS)
    result = LookupResult(engine.model, whole[:1], extra_chunks=[whole[1:2], whole[2:]])
    select_output_keys(result, OutputOptions(keys))
    chunks = [result.values, *result.extra_chunks]
    assert [len(chunk) for chunk in chunks] == [1, 1, 1]
    assert np.array_equal(np.concatenate(chunks), selected(engine, keys))


@pytest.mark.parametrize(
    ("value", "field", "problem"),
    [
        ('"user"', "output_keys", 'is "user": expected a list of keys'),
        ('["user", 7]', "output_keys[1]", "is 7: expected a key"),
        ('["\\ud800"]', "output_keys[0]", "half of a surrogate pair"),
    ],
)
async def test_invalid_output_keys_are_rejected(
    live: Live, value: str, field: str, problem: str
) -> None:
    body = '{"features": {"user": [1]}, "output_keys": %s}' % value  # noqa: UP031
    answer = await live.http.post("/embed", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["field"]) == (400, field)
    assert problem in error["message"]


def test_cache_of_key_selections_is_bounded() -> None:
    """Checks that a caller who selects other keys each time does not fill memory."""
    model = model_info(features={f"f{i}": (2, 1) for i in range(3 * SELECTIONS_MAX)})
    first = model.with_keys(("f1", "f0"))
    assert model.with_keys(("f1", "f0")) is first
    assert first.keys == ("f0", "f1")
    for key in model.keys:
        assert check_output(OutputOptions((key,)), model).keys == (key,)
        model.with_keys((key,))
    assert len(model.key_selections) <= SELECTIONS_MAX
    with pytest.raises(InvalidRequestError, match=r"output_keys\[0\] is 'f99'"):
        check_output(OutputOptions(("f99",)), model)
