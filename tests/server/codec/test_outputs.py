"""Tests of requested outputs over REST and gRPC: some of the keys, and float16.

The response has the requested keys of the full response, or its values rounded to half the bytes.
"""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import model_info, unpooled_info
from server.live import PROTOBUF, Live, live_server
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
FLOAT32, FLOAT16, UNKNOWN = pb.FLOAT32, pb.FLOAT16, 7
PROBLEM = "output_dtype is 7, expected FLOAT32 (0) or FLOAT16 (1)"
SELECTIONS = [("user",), ("tag", "user"), ("movie", "tag"), ("movie", "user"), ("tag",)]


@pytest.fixture
def engine() -> FakeEngine:
    """Returns an engine whose row 6 of user has values just beyond and just within float16's
    range."""
    engine = FakeEngine()
    engine.tables["t_user"][6] = [1e5, -1e5, 65504, 1e-7]
    return engine


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    limits = Limits(request_features_max=3)
    async with live_server(engine, FakeEngine(unpooled_info()), limits=limits) as live:
        yield live


def selected(engine: FakeEngine, keys: tuple[str, ...] = (), dtype: Any = pb.FLOAT32) -> np.ndarray:
    """Returns the expected result of BAGS, of all ``keys`` without any."""
    whole = engine.expected(BAGS)
    parts = [whole[:, columns] for key, columns in COLUMNS.items() if not keys or key in keys]
    with np.errstate(over="ignore"):
        return np.concatenate(parts, axis=1).astype("<f2" if dtype == pb.FLOAT16 else "<f4")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_openapi_describes_the_keys_of_requests_and_responses(live: Live, dtype: str) -> None:
    request = {"features": BAGS, "output_keys": ["tag", "user"], "output_dtype": dtype}
    described = (await live.http.get("/openapi.json")).json()
    validate(request, "EmbedRequest", described)
    response = (await live.http.post("/embed", json=request)).json()
    validate(response, "EmbedResponse", described)
    assert (response["keys"], response["length_per_key"]) == (["user", "tag"], [4, 2])


@pytest.mark.parametrize(
    "options",
    [{"output_keys": []}, {"output_keys": ["tag", "movie", "user"]}, {"output_dtype": "float32"}],
)
async def test_all_or_no_keys_and_float32_yield_the_default_response(
    live: Live, options: dict[str, Any]
) -> None:
    plain = await live.stub.Embed(pb.EmbedRequest(keys=["tag", "user"], **IDS))
    keys = options.get("output_keys", [])
    named = await live.stub.Embed(pb.EmbedRequest(keys=["tag", "user"], output_keys=keys, **IDS))
    assert named == plain
    json_plain = await live.http.post("/embed", json={"features": BAGS})
    json_named = await live.http.post("/embed", json={"features": BAGS} | options)
    assert json_named.content == json_plain.content
    assert "output_dtype" not in json_plain.json()


async def test_json_request_can_get_a_float16_protobuf_response(
    live: Live, engine: FakeEngine
) -> None:
    answer = await live.http.post(
        "/embed",
        json={"features": BAGS, "output_dtype": "float16"},
        headers={"accept": PROTOBUF},
    )
    response, expected = pb.EmbedResponse.FromString(answer.content), selected(engine, (), FLOAT16)
    assert np.isinf(expected).sum() == 2
    assert (response.output_dtype, response.values) == (FLOAT16, expected.tobytes())


async def test_each_request_of_a_batch_has_its_own_outputs(live: Live, engine: FakeEngine) -> None:
    requested: list[tuple[tuple[str, ...], Any]] = [
        *(((), dtype) for dtype in (FLOAT16, FLOAT32, UNKNOWN, FLOAT16)),
        *((keys, FLOAT32) for keys in (("user",), (), ("tag",), ("user",))),
    ]
    requests = [
        pb.EmbedRequest(keys=["tag", "user"], output_keys=keys, output_dtype=dtype, **IDS)
        for keys, dtype in requested
    ]
    responses = [answer async for answer in live.stub.EmbedStream(iter(requests))]
    for (keys, dtype), answer in zip(requested, responses, strict=True):
        if dtype == UNKNOWN:
            error = pb.Error(code="INVALID_ARGUMENT", message=PROBLEM, field="output_dtype")
            assert answer == pb.EmbedResponse(error=error)
        else:
            assert answer.output_dtype == dtype
            assert answer.values == selected(engine, keys, dtype).tobytes()


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
        sent = "".join([*key])
        (own,) = check_output(OutputOptions((sent,)), model).keys
        assert own is key  # and not the caller's string
        model.with_keys((key,))
    assert len(model.key_selections) <= SELECTIONS_MAX
    with pytest.raises(InvalidRequestError, match=r"output_keys\[0\] is 'f99'"):
        check_output(OutputOptions(("f99",)), model)
