"""Tests of the limits on requests of the Open Inference Protocol, in every format."""

import grpc
import pytest
from server.fake_engine import FakeEngine
from server.live import live_server
from server.open_inference import InferRequest, Input, jagged
from server.wire.inference_requests import BAGS, stub

from embedserve.config import Limits


@pytest.mark.parametrize(
    ("limits", "infer_request"),
    [
        (Limits(request_features_max=2), InferRequest(jagged(BAGS), ["user"] * 3)),
        (Limits(request_text_bytes_max=60), InferRequest(jagged(BAGS))),
        (
            Limits(request_ids_max=3),
            InferRequest([Input("tag", "INT64", [[1, 2], [3, 4]]), *jagged({"user": [[1], []]})]),
        ),
        (Limits(request_text_bytes_max=300), InferRequest(jagged({"user": [["x" * 400]]}))),
        (Limits(request_values_max=300), InferRequest(jagged({"user": [["a"] * 400]}))),
    ],
    ids=["outputs", "text", "padded ids", "bytes of strings", "strings"],
)
async def test_limits_apply_in_every_format(
    engine: FakeEngine, limits: Limits, infer_request: InferRequest
) -> None:
    async with live_server(engine, limits=limits) as live:
        for body, headers in ((infer_request.json_body(), {}), infer_request.binary_body()):
            answer = await live.http.post("/v2/models/shop/infer", content=body, headers=headers)
            assert answer.status_code == 413, answer.text
            assert "the limit is" in answer.json()["error"]
        for is_raw in (True, False):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(live).ModelInfer(infer_request.message("shop", is_raw=is_raw))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "the limit is" in (caught.value.details() or "")


async def test_values_are_counted_before_decoding(engine: FakeEngine) -> None:
    """Checks that the server counts commas in JSON, and fields at all depths in messages."""
    async with live_server(engine, limits=Limits(request_values_max=300)) as live:
        infer_request = InferRequest(jagged({"user": [[1] * 400]}))
        answer = await live.http.post("/v2/models/shop/infer", content=infer_request.json_body())
        assert answer.status_code == 413
        body, headers = infer_request.binary_body()
        answer = await live.http.post("/v2/models/shop/infer", content=body, headers=headers)
        assert answer.status_code == 200  # numbers in binary do not count
        message = infer_request.message("shop", is_raw=False)
        assert len((await stub(live).ModelInfer(message)).outputs) == 3  # nor do packed ones
        del message.inputs[0].contents.int64_contents[:]
        message.inputs[0].contents.bytes_contents.extend([b"x"] * 400)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(live).ModelInfer(message)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
