"""Tests of inference by the Open Inference Protocol over REST and gRPC, in every format.

The results equal those of /embed, and errors have the protocol's own format.
"""

import json
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from server.fake_engine import FakeEngine
from server.fake_models import model_info
from server.live import Live, live_server
from server.open_inference import (
    LENGTH_HEADER,
    InferRequest,
    Input,
    jagged,
    read_body,
    read_message,
)
from server.wire.inference_requests import (
    BAGS,
    COLUMNS,
    Infer,
    RejectedRequestError,
    as_json,
    as_raw,
    as_stream,
    check,
    infer,
    live,
    stub,
)

from embedserve_proto import open_inference_pb2 as pb

__all__ = ["infer", "live"]


async def test_pooled_output_concatenates_all_keys(
    live: Live, engine: FakeEngine, infer: Infer
) -> None:
    expected = engine.expected(BAGS)
    alone = await infer(live, InferRequest(jagged(BAGS), ["pooled"]), "shop")
    assert list(alone.outputs) == ["pooled"]
    assert np.array_equal(alone.outputs["pooled"], expected)
    both = await infer(live, InferRequest(jagged(BAGS), ["tag", "pooled"]), "shop")
    assert set(both.outputs) == {"pooled", "tag"}
    assert np.array_equal(both.outputs["pooled"], expected)
    assert np.array_equal(both.outputs["tag"], expected[:, COLUMNS["tag"]])


async def test_request_id_is_returned(live: Live, infer: Infer) -> None:
    response = await infer(live, InferRequest(jagged(BAGS), request_id='a "7" é'), "shop")
    assert response.request_id == 'a "7" é'


async def test_negative_ids_are_padding(live: Live, engine: FakeEngine, infer: Infer) -> None:
    inputs = [
        Input("tag", "INT64", [[1, -1], [2, 3], [-1, -7]]),
        Input("user", "INT64", [[4], [-1], [6]]),
    ]
    check(await infer(live, InferRequest(inputs), "shop"), engine.expected(BAGS))
    mixed = [inputs[0], *jagged({"user": BAGS["user"]})]
    check(await infer(live, InferRequest(mixed), "shop"), engine.expected(BAGS))
    weighted = [*mixed, Input("tag.weights", "FP32", [[0.5, 9], [2, -1], [9, 9]])]
    weights = {"tag": [[0.5], [2.0, -1.0], []], "user": [[1.0], [], [1.0]]}
    check(await infer(live, InferRequest(weighted), "shop"), engine.expected(BAGS, weights))


async def test_outputs_may_mix_binary_and_json(live: Live, engine: FakeEngine) -> None:
    body = json.loads(InferRequest(jagged(BAGS)).json_body())
    body["outputs"] = [
        {"name": "user", "parameters": {"binary_data": True}},
        {"name": "tag"},
        {"name": "pooled", "parameters": {"binary_data": True}},
    ]
    response = await live.http.post("/v2/models/shop/infer", json=body)
    read = read_body(response.content, response.headers[LENGTH_HEADER])
    expected = engine.expected(BAGS)
    assert np.array_equal(read.outputs["pooled"], expected)
    assert np.array_equal(read.outputs["user"], expected[:, COLUMNS["user"]])
    assert np.array_equal(read.outputs["tag"], expected[:, COLUMNS["tag"]])
    head = json.loads(response.content[: int(response.headers[LENGTH_HEADER])])
    assert ["data" in one for one in head["outputs"]] == [False, False, True]


# Errors


def one(name: str, datatype: str, values: Any, shape: Any = None) -> InferRequest:
    return InferRequest([Input(name, datatype, values, shape)])


LENGTHS = Input("user.lengths", "INT32", [1, 1])
WRONG: dict[str, tuple[InferRequest, str]] = {
    "datatype": (one("user.ids", "INT32", [1]), "'user.ids' (INT32 [1]) is not INT64 or BYTES"),
    "padded datatype": (one("user", "FP32", [[1.0]]), "'user' (FP32 [1, 1]) is not INT64"),
    "rank": (one("user", "INT64", [1, 2]), "'user' (INT64 [2]) is not [batch, k]"),
    "alone": (one("user.ids", "INT64", [1]), "has no input 'user.lengths' beside it"),
    "lengths alone": (InferRequest([LENGTHS]), "has no input 'user.ids' beside it"),
    "sum": (
        InferRequest([Input("user.ids", "INT64", [1, 2, 3]), LENGTHS]),
        "'user.lengths' (INT32 [2]) adds up to 2, but input 'user.ids' (INT64 [3]) has 3",
    ),
    "sum of another": (
        InferRequest(
            [
                Input("tag.ids", "INT64", [1, 2, 3]),
                Input("tag.lengths", "INT32", [1, 1]),
                Input("user.ids", "INT64", [1]),
                LENGTHS,
            ]
        ),
        "'tag.lengths' (INT32 [2]) adds up to 2",
    ),
    "negative": (
        InferRequest([Input("user.ids", "INT64", [1]), Input("user.lengths", "INT32", [2, -1])]),
        "'user.lengths' (INT32 [2]) has -1 at 1",
    ),
    "examples": (
        InferRequest([*jagged({"tag": [[1]]}), Input("user.ids", "INT64", [1, 2]), LENGTHS]),
        "'user.lengths' (INT32 [2]) has 2 examples, input 'tag.lengths' (INT32 [1]) has 1",
    ),
    "twice": (InferRequest([*jagged(BAGS), *jagged(BAGS)]), "is given twice"),
    "both": (
        InferRequest([*jagged({"user": [[1]]}), Input("user", "INT64", [[1]])]),
        "is given beside 'user.ids'",
    ),
    "weights": (
        InferRequest([*jagged({"user": [[1]]}), Input("user.weights", "FP32", [1.0, 2.0])]),
        "'user.weights' (FP32 [2]) has not the shape of input 'user.ids' (INT64 [1])",
    ),
    "padded weights": (
        InferRequest([Input("user", "INT64", [[1]]), Input("user.weights", "FP32", [[1.0, 2.0]])]),
        "'user.weights' (FP32 [1, 2]) has not the shape of input 'user' (INT64 [1, 1])",
    ),
    "empty batch": (InferRequest(jagged({"user": []})), "(INT32 [0]) is an empty batch"),
    "few strings": (
        InferRequest([Input("user.ids", "BYTES", ["1"], [2]), LENGTHS]),
        "'user.ids' (BYTES [2]) has ",
    ),
    "many strings": (
        InferRequest(
            [Input("user.ids", "BYTES", ["1", "2"], [1]), Input("user.lengths", "INT32", [1])]
        ),
        "'user.ids' (BYTES [1]) has ",
    ),
    "strings' rank": (one("user.ids", "BYTES", [["1"]]), "'user.ids' (BYTES [1, 1]) is not "),
    "none": (InferRequest([]), "inputs is empty"),
    "pooled twice": (InferRequest(jagged(BAGS), ["pooled"] * 2), "outputs names 'pooled' twice"),
    "beside pooled": (
        InferRequest(jagged(BAGS), ["pooled", "film"]),
        "outputs[0] is 'film': model 'shop' has no such key",
    ),
    "dtype": (
        InferRequest(jagged(BAGS), parameters={"output_dtype": "BF16"}),
        "parameters.output_dtype is 'BF16', expected 'FP32' or 'FP16'",
    ),
    "long id": (InferRequest(jagged(BAGS), request_id="7" * 2000), "id has 2000 characters"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_errors_have_the_format_of_the_protocol(
    live: Live, engine: FakeEngine, case: str, infer: Infer
) -> None:
    infer_request, expected_error = WRONG[case]
    if infer is as_stream:
        right = InferRequest(jagged(BAGS)).message("shop", is_raw=True)
        requests = iter([right, infer_request.message("shop", is_raw=True), right])
        answers = [one async for one in stub(live).ModelStreamInfer(requests)]
        check(read_message(answers[0].infer_response), engine.expected(BAGS))
        check(read_message(answers[2].infer_response), engine.expected(BAGS))
        message = answers[1].error_message.removeprefix("[INVALID_ARGUMENT] ")
        assert not answers[1].HasField("infer_response")
    else:
        with pytest.raises(RejectedRequestError) as caught:
            await infer(live, infer_request, "shop")
        assert caught.value.status in (400, "INVALID_ARGUMENT")
        message = str(caught.value)
    assert expected_error in message


async def error_message_of(live: Live, body: bytes, headers: dict[str, str], path: str = "") -> str:
    answer = await live.http.post(path or "/v2/models/shop/infer", content=body, headers=headers)
    assert answer.status_code in (400, 404, 405, 413, 415), answer.text
    error_body = answer.json()
    assert list(error_body) == ["error"]
    message: str = error_body["error"]
    return message


async def test_binary_sizes_beyond_the_body_are_rejected(live: Live) -> None:
    body, headers = InferRequest(jagged(BAGS)).binary_body()
    head = int(headers[LENGTH_HEADER])

    def resized(size: int) -> tuple[bytes, int]:
        changed = json.loads(body[:head])
        changed["inputs"][0]["parameters"]["binary_data_size"] = size
        dumped = json.dumps(changed).encode()
        return dumped + body[head:], len(dumped)

    cases: list[tuple[bytes, int | str, str]] = [
        (body[:-3], head, "size of 12, but of the 61 bytes behind the JSON 9 are"),
        (body + b"x", head, "bytes behind its JSON, but"),
        (body, head - 1, "not an inference request"),
        (body, len(body) + 1, f"is {len(body) + 1}, but the body has {len(body)}"),
        *[
            (body, value, "Inference-Header-Content-Length is")
            for value in ("-1", "x", "9" * 30, "9" * 5000)  # int() takes at most 4300 digits
        ],
        (*resized(2**62), "left"),
        (*resized(-1), "binary_data_size"),
    ]
    for sent, head_bytes, expected_error in cases:
        message = await error_message_of(live, sent, {LENGTH_HEADER: str(head_bytes)})
        assert expected_error in message


@pytest.mark.parametrize(
    ("values", "expected_error"),
    [
        ('"data": [1, "a"]', "has 'a' at 1, which is not INT64"),
        ('"data": [1.5, 2]', "has 1.5 at 0, which is not INT64"),
        ('"data": [1, 9223372036854775808]', "at 1, which is not INT64"),
        ('"data": [1, [2]]', "has a list at 1"),
        ('"data": [1]', "has 8 bytes, not 16"),
        ('"data": [true, 2]', "not an inference request"),
        ('"data": {}', "not an inference request"),
        ('"data": ["a", 1], "datatype": "BYTES"', "has 1 at 1, which is not BYTES"),
        ('"name": "x"', "has neither data nor a binary_data_size"),
        ('"data": [1, 2], "parameters": {"binary_data_size": 16}', "send one"),
        ('"parameters": {"shared_memory_region": "a"}', "does not use (--shared-memory)"),
    ],
)
async def test_invalid_tensor_data_is_rejected(
    live: Live, values: str, expected_error: str
) -> None:
    given = f'{{"name": "user.ids", "datatype": "INT64", "shape": [2], {values}}}'
    other = '{"name": "user.lengths", "datatype": "INT32", "shape": [1], "data": [2]}'
    message = await error_message_of(live, f'{{"inputs": [{given}, {other}]}}'.encode(), {})
    assert expected_error in message


async def test_classification_is_rejected(live: Live) -> None:
    body = json.loads(InferRequest(jagged(BAGS)).json_body())
    body["outputs"] = [{"name": "user", "parameters": {"classification": 3}}]
    assert "classification" in await error_message_of(live, json.dumps(body).encode(), {})
    message = InferRequest(jagged(BAGS)).message("shop", is_raw=True)
    output = message.outputs.add(name="user")
    output.parameters["classification"].int64_param = 3
    await assert_rejected(live, message, "'user' asks for a classification")


async def test_body_without_a_request_is_rejected(live: Live) -> None:
    for body in (b"", b"[]", b"{", b'{"inputs": 7}', b"\xff", b"[" * 5000):
        assert "not an inference request" in await error_message_of(live, body, {})
    answer = await live.http.put("/v2/models/shop/infer", content=b"{}")
    assert (answer.status_code, list(answer.json())) == (405, ["error"])
    compressed = {"content-encoding": "gzip"}
    assert "Content-Encoding" in await error_message_of(live, b"x", compressed)


async def test_raw_and_typed_contents_cannot_be_mixed(live: Live) -> None:
    message = InferRequest(jagged(BAGS)).message("shop", is_raw=True)
    message.inputs[1].contents.int_contents.append(1)
    await assert_rejected(
        live, message, "'tag.lengths' (INT32 [3]) has contents, but there are raw"
    )
    del message.inputs[1].contents.int_contents[:]
    message.inputs[1].ClearField("contents")
    message.raw_input_contents.append(b"")
    await assert_rejected(live, message, "raw_input_contents has 5 entries for 4 inputs")
    del message.raw_input_contents[4:]
    message.raw_input_contents[2] += b"1234"
    await assert_rejected(live, message, "'user.ids' (INT64 [2]) has 20 bytes, not 16")
    typed = InferRequest(jagged(BAGS)).message("shop", is_raw=False)
    typed.inputs[0].contents.int64_contents.append(1)
    await assert_rejected(
        live, typed, "'tag.ids' (INT64 [3]) has 4 values in int64_contents, not 3"
    )


async def test_malformed_tensors_in_messages_are_rejected(live: Live) -> None:
    few = WRONG["few strings"][0].message("shop", is_raw=True)
    await assert_rejected(live, few, "has 5 bytes, which end within string 1 of 2")
    negative = one("user", "INT64", [1, 2, 3], [-1, -3])
    strings = one("user.ids", "BYTES", ["a"])
    for is_raw in (True, False):
        message = negative.message("shop", is_raw=is_raw)
        await assert_rejected(live, message, "'user' (INT64 [-1, -3]) has a negative size")
        message = strings.message("shop", is_raw=is_raw)
        of_strings = (
            message.raw_input_contents if is_raw else message.inputs[0].contents.bytes_contents
        )
        of_strings[0] = of_strings[0].replace(b"a", b"\xff")
        await assert_rejected(live, message, "has a string at 0 that is not UTF-8")


async def test_unpooled_model_has_no_pooled_output(live: Live) -> None:
    infer_request = InferRequest(jagged({"last": [[1]]}), ["pooled"])
    for one_format in (as_json, as_raw):
        with pytest.raises(RejectedRequestError, match="it has no 'pooled'"):
            await one_format(live, infer_request, "sequence")


async def assert_rejected(live: Live, message: pb.ModelInferRequest, expected_error: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(live).ModelInfer(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert expected_error in (caught.value.details() or "")


async def test_malformed_message_is_rejected(live: Live) -> None:
    call = live.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    for body in (b"\xff", b"\x2a\x10abc", b"\x0b" * 20_000, b"\x2a\x02\xff\xff" * 10_000):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(body)
        assert caught.value.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )


async def test_several_versions_of_a_model_are_served() -> None:
    """Requests versions by number and by alias; a request without a version goes to the first."""
    engines = []
    for alias, number in (("stable", 7), ("canary", 8)):
        info = model_info()
        manifest = replace(info.manifest, version=number)
        named = replace(info, manifest=manifest, served_name=f"shop@{alias}")
        engines.append(FakeEngine(named, seed=number))
    stable, canary = engines
    infer_request = InferRequest(jagged(BAGS))
    async with live_server(*engines) as live:
        for version, engine in (("7", stable), ("8", canary), ("canary", canary), ("", stable)):
            message = infer_request.message("shop", is_raw=True, version=version)
            over_grpc = read_message(await stub(live).ModelInfer(message))
            assert over_grpc.version == str(engine.model.version)
        metadata = (await live.http.get("/v2/models/shop")).json()
        assert metadata["versions"] == ["7", "8"]
        metadata = (await live.http.get("/v2/models/shop/versions/canary")).json()
        assert metadata["versions"] == ["8"]
        statistics = (await live.http.get("/v2/models/shop/stats")).json()["model_stats"]
        counts = [
            (one["version"], one["inference_stats"]["success"]["count"]) for one in statistics
        ]
        assert counts == [("7", 2), ("8", 2)]
        one = await live.http.get("/v2/models/shop/versions/8/stats")
        assert [statistics["version"] for statistics in one.json()["model_stats"]] == ["8"]
        index = (await live.http.post("/v2/repository/index")).json()
        assert [(one["name"], one["version"]) for one in index] == [("shop", "7"), ("shop", "8")]
        wrong = await live.http.get("/v2/models/shop/versions/9/ready")
        assert (wrong.status_code, "7 (stable), 8 (canary)" in wrong.json()["error"]) == (404, True)


async def test_many_outputs_of_different_formats_are_rejected(live: Live) -> None:
    body = json.loads(InferRequest(jagged(BAGS)).json_body())
    body["outputs"] = [
        {"name": f"f{at}", "parameters": {"binary_data": at % 2 == 0}} for at in range(200)
    ]
    assert "another binary_data" in await error_message_of(live, json.dumps(body).encode(), {})
