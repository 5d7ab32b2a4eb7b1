"""Tests of metadata, health, statistics and the repository index of the Open Inference Protocol."""

import json

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from server.fake_engine import FakeEngine
from server.live import GRPC_SERVERS, Live, live_server
from server.open_inference import InferRequest, jagged
from server.openapi import validate
from server.wire.inference_requests import BAGS, as_binary, infer, live, stub

from embedserve_proto import open_inference_pb2 as pb

__all__ = ["infer", "live"]


async def test_health_and_metadata_over_rest(live: Live) -> None:
    get = live.http.get
    server = (await get("/v2")).json()
    assert server["name"] == "embedserve"
    assert "binary_tensor_data" in server["extensions"]
    assert (await get("/v2/health/live")).json() == {"live": True}
    assert (await get("/v2/health/ready")).json() == {"ready": True}
    model = (await get("/v2/models/shop")).json()
    assert (await get("/v2/models/shop/versions/7")).json() == model
    assert (model["name"], model["versions"]) == ("shop", ["7"])
    assert {"name": "user.ids", "datatype": "INT64", "shape": [-1]} in model["inputs"]
    assert {"name": "user.lengths", "datatype": "INT32", "shape": [-1]} in model["inputs"]
    assert {"name": "movie", "datatype": "FP32", "shape": [-1, 3]} in model["outputs"]
    assert {"name": "pooled", "datatype": "FP32", "shape": [-1, 9]} in model["outputs"]
    assert (await get("/v2/models/shop/ready")).json() == {"name": "shop", "ready": True}
    ruled = (await get("/v2/models/ruled")).json()
    assert {"name": "tag.ids", "datatype": "BYTES", "shape": [-1]} in ruled["inputs"]
    sequence = (await get("/v2/models/sequence")).json()
    assert "pooled" not in [one["name"] for one in sequence["outputs"]]
    for path in ("/v2/models/film", "/v2/models/shop/versions/8/ready", "/v2/nothing"):
        response = await get(path)
        assert (response.status_code, list(response.json())) == (404, ["error"])


async def test_health_and_metadata_over_grpc_equal_those_over_rest(live: Live) -> None:
    calls = stub(live)
    assert (await calls.ServerLive(pb.ServerLiveRequest())).live
    assert (await calls.ServerReady(pb.ServerReadyRequest())).ready
    assert (await calls.ModelReady(pb.ModelReadyRequest(name="shop"))).ready
    assert (await calls.ModelReady(pb.ModelReadyRequest(name="shop", version="7"))).ready
    for name, version in (("film", ""), ("shop", "8")):
        ready_request = pb.ModelReadyRequest(name=name, version=version)
        assert not (await calls.ModelReady(ready_request)).ready
    server = await calls.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, "statistics" in server.extensions) == ("embedserve", True)
    metadata = await calls.ModelMetadata(pb.ModelMetadataRequest(name="shop"))
    described = (await live.http.get("/v2/models/shop")).json()
    for mine, theirs in ((metadata.inputs, "inputs"), (metadata.outputs, "outputs")):
        tensors = [(one.name, one.datatype, list(one.shape)) for one in mine]
        assert tensors == [tuple(one.values()) for one in described[theirs]]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls.ModelMetadata(pb.ModelMetadataRequest(name="film"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_model_configuration_lists_tensors_over_rest_and_grpc(live: Live) -> None:
    get = live.http.get
    config = (await get("/v2/models/shop/config")).json()
    assert (await get("/v2/models/shop/versions/7/config")).json() == config
    assert (config["name"], config["max_batch_size"]) == ("shop", 0)
    of_user = {"name": "user.ids", "data_type": "TYPE_INT64", "dims": [-1], "optional": True}
    assert of_user in config["input"]
    assert {"name": "movie", "data_type": "TYPE_FP32", "dims": [-1, 3]} in config["output"]
    ruled = (await get("/v2/models/ruled/config")).json()["input"]
    assert "TYPE_STRING" in [one["data_type"] for one in ruled if one["name"] == "tag.ids"]
    over_grpc = await stub(live).ModelConfig(pb.ModelConfigRequest(name="shop"))
    assert MessageToDict(over_grpc.config, preserving_proto_field_name=True) == {
        **{key: value for key, value in config.items() if value},
        **{
            side: [{**one, "dims": [str(size) for size in one["dims"]]} for one in config[side]]
            for side in ("input", "output")
        },
    }
    assert (await get("/v2/models/film/config")).status_code == 404
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(live).ModelConfig(pb.ModelConfigRequest(name="shop", version="8"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_draining_server_is_not_ready(live: Live) -> None:
    live.pipeline.models.not_ready = "draining"
    for path in ("/v2/health/ready", "/v2/models/shop/ready"):
        response = await live.http.get(path)
        assert (response.status_code, response.json()) == (503, {"error": "draining"})
    assert not (await stub(live).ServerReady(pb.ServerReadyRequest())).ready
    assert not (await stub(live).ModelReady(pb.ModelReadyRequest(name="shop"))).ready
    index = await stub(live).RepositoryIndex(pb.RepositoryIndexRequest())
    assert {(one.state, one.reason) for one in index.models} == {("UNAVAILABLE", "draining")}
    ready = await live.http.post("/v2/repository/index", json={"ready": True})
    assert ready.json() == []


async def test_statistics_count_requests_examples_and_batches(live: Live) -> None:
    for _ in range(3):
        await as_binary(live, InferRequest(jagged(BAGS)))
    statistics = (await live.http.get("/v2/models/shop/stats")).json()["model_stats"]
    assert [one["name"] for one in statistics] == ["shop"]
    counts = statistics[0]["inference_stats"]
    assert (statistics[0]["inference_count"], statistics[0]["execution_count"]) == (9, 3)
    assert counts["success"]["count"] == counts["queue"]["count"] == 3
    compute = [counts[f"compute_{of}"] for of in ("input", "infer", "output")]
    assert [one["count"] for one in compute] == [3, 3, 3]
    assert counts["success"]["ns"] >= counts["compute_infer"]["ns"] > 0
    of_all = (await live.http.get("/v2/models/stats")).json()["model_stats"]
    assert [one["name"] for one in of_all] == ["shop", "ruled", "sequence"]
    over_grpc = await stub(live).ModelStatistics(pb.ModelStatisticsRequest(name="shop"))
    assert over_grpc.model_stats[0].inference_count == 9
    assert over_grpc.model_stats[0].inference_stats.queue.count == 3
    every = await stub(live).ModelStatistics(pb.ModelStatisticsRequest())
    assert len(every.model_stats) == 3
    assert (await live.http.get("/v2/models/film/stats")).status_code == 404


async def test_failure_statistics_are_equal_over_rest_and_grpc(
    live: Live, engine: FakeEngine
) -> None:
    await as_binary(live, InferRequest(jagged(BAGS)))
    engine.failure = ZeroDivisionError("secret")
    body = InferRequest(jagged(BAGS)).json_body()
    for _ in range(2):
        assert (await live.http.post("/v2/models/shop/infer", content=body)).status_code == 500
    engine.failure = None
    wrong = InferRequest(jagged({"film": [[1]]})).json_body()
    assert (await live.http.post("/v2/models/shop/infer", content=wrong)).status_code == 400
    assert (await live.http.post("/v2/models/film/infer", content=body)).status_code == 404
    statistics = (await live.http.get("/v2/models/stats")).json()["model_stats"]
    counts = {one["name"]: one["inference_stats"] for one in statistics}
    assert {name: one["fail"]["count"] for name, one in counts.items()} == {
        "shop": 3,
        "ruled": 0,
        "sequence": 0,
    }
    assert counts["shop"]["success"]["count"] == 1
    assert counts["shop"]["fail"]["ns"] > 0
    (over_grpc,) = (
        await stub(live).ModelStatistics(pb.ModelStatisticsRequest(name="shop"))
    ).model_stats
    stats = over_grpc.inference_stats
    assert (stats.success.count, stats.fail.count) == (1, 3)
    assert stats.fail.ns == counts["shop"]["fail"]["ns"]


async def test_openapi_describes_requests_responses_and_errors(live: Live) -> None:
    described = (await live.http.get("/openapi.json")).json()
    infer_body = json.loads(InferRequest(jagged(BAGS)).json_body())
    validate(infer_body, "InferRequest", described)
    answer = await live.http.post("/v2/models/shop/infer", json=infer_body)
    validate(answer.json(), "InferResponse", described)
    error = await live.http.post("/v2/models/film/infer", json=infer_body)
    validate(error.json(), "InferError", described)
    for path in ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"):
        assert "post" in described["paths"][path]
    for path in ("/v2", "/v2/models/{model}", "/v2/repository/index"):
        for operation in described["paths"][path].values():
            assert "InferError" in str(operation["responses"]["default"])
            assert "422" not in operation["responses"]


async def test_repository_index_lists_the_models(live: Live) -> None:
    index = (await live.http.post("/v2/repository/index")).json()
    assert index[0] == {"name": "shop", "version": "7", "state": "READY", "reason": ""}
    assert len(index) == 3
    over_grpc = await stub(live).RepositoryIndex(pb.RepositoryIndexRequest(ready=True))
    assert [one.name for one in over_grpc.models] == ["shop", "ruled", "sequence"]
    response = await live.http.post("/v2/repository/index", json={"ready": "perhaps"})
    assert (response.status_code, list(response.json())) == (400, ["error"])
    response = await live.http.post("/v2/repository/index", content=b" " * 70_000)
    message = "body has 70000 bytes, the limit is 65536"
    assert (response.status_code, response.json()) == (413, {"error": message})


@pytest.mark.parametrize("grpc_server", GRPC_SERVERS)
async def test_grpcio_server_reports_ready_models_statistics_and_unknown_models(
    engine: FakeEngine, grpc_server: str
) -> None:
    async with live_server(engine, grpc_server=grpc_server) as live:
        assert (await stub(live).ModelReady(pb.ModelReadyRequest(name="shop"))).ready
        statistics = await stub(live).ModelStatistics(pb.ModelStatisticsRequest())
        assert [one.name for one in statistics.model_stats] == ["shop"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(live).ModelMetadata(pb.ModelMetadataRequest(name="film"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
