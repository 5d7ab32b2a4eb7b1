"""Clauses of gRPC: functions whose docstrings state the clauses, as the report prints them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from conformance.asked import ANSWER_S_MAX, ServerUnderTest, check_outputs, check_status

from embedserve_proto import open_inference_pb2 as pb


def health(asked: ServerUnderTest) -> None:
    """ServerLive, ServerReady and ModelReady"""
    assert asked.stub.ServerLive(pb.ServerLiveRequest(), timeout=ANSWER_S_MAX).live
    assert asked.stub.ServerReady(pb.ServerReadyRequest(), timeout=ANSWER_S_MAX).ready
    request = pb.ModelReadyRequest(name=asked.model)
    assert asked.stub.ModelReady(request, timeout=ANSWER_S_MAX).ready


def metadata(asked: ServerUnderTest) -> None:
    """ServerMetadata and ModelMetadata tell what REST tells"""
    server = asked.stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=ANSWER_S_MAX)
    assert server.name == asked.get("/v2")["name"]
    request = pb.ModelMetadataRequest(name=asked.model)
    model = asked.stub.ModelMetadata(request, timeout=ANSWER_S_MAX)
    for told, rest in ((model.inputs, "inputs"), (model.outputs, "outputs")):
        mine = [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in told]
        assert mine == asked.metadata[rest]
    unknown = pb.ModelMetadataRequest(name="no-such-model")
    check_status(grpc.StatusCode.NOT_FOUND, lambda: asked.stub.ModelMetadata(unknown))


def check_message(asked: ServerUnderTest, answer: pb.ModelInferResponse) -> None:
    outputs: list[dict[str, Any]] = [
        {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
        for one in answer.outputs
    ]
    check_outputs(asked, outputs)
    sizes = [len(raw) for raw in answer.raw_output_contents]
    assert sizes == [one["shape"][0] * one["shape"][1] * 4 for one in outputs]


def infer(asked: ServerUnderTest) -> None:
    """ModelInfer with raw and with typed contents, and not with both"""
    for is_raw in (True, False):
        message = asked.message(is_raw=is_raw, id="request 7")
        answer = asked.stub.ModelInfer(message, timeout=ANSWER_S_MAX)
        assert (answer.model_name, answer.id) == (asked.model, "request 7")
        check_message(asked, answer)
    mixed = asked.message()
    mixed.inputs[0].contents.int64_contents.append(1)
    check_status(grpc.StatusCode.INVALID_ARGUMENT, lambda: asked.stub.ModelInfer(mixed))


def errors(asked: ServerUnderTest) -> None:
    """ModelInfer of an unknown model, version or output ends with its status"""
    for code, wrong in (
        (grpc.StatusCode.NOT_FOUND, pb.ModelInferRequest(model_name="no-such-model")),
        (grpc.StatusCode.NOT_FOUND, pb.ModelInferRequest(model_version="987654321")),
        (grpc.StatusCode.INVALID_ARGUMENT, pb.ModelInferRequest(outputs=[{"name": "nothing"}])),
    ):
        message = asked.message()
        message.MergeFrom(wrong)
        check_status(code, lambda message=message: asked.stub.ModelInfer(message))  # type: ignore[misc]


def stream(asked: ServerUnderTest) -> None:
    """ModelStreamInfer answers in order, and a wrong request by error_message in its place"""

    def messages() -> Iterator[pb.ModelInferRequest]:
        yield asked.message(id="first")
        yield asked.message(id="wrong", outputs=[{"name": "no such output"}])
        yield asked.message(id="last")

    first, wrong, last = asked.stub.ModelStreamInfer(messages(), timeout=ANSWER_S_MAX)
    assert [one.infer_response.id for one in (first, last)] == ["first", "last"]
    check_message(asked, last.infer_response)
    assert wrong.error_message


def statistics(asked: ServerUnderTest) -> None:
    """statistics count inferences and executions, the same over REST and gRPC"""
    (before,) = asked.get(f"/v2/models/{asked.model}/stats")["model_stats"]
    asked.infer(asked.body())
    (after,) = asked.get(f"/v2/models/{asked.model}/stats")["model_stats"]
    assert after["inference_count"] > before["inference_count"]
    assert after["execution_count"] > before["execution_count"]
    request = pb.ModelStatisticsRequest(name=asked.model)
    (told,) = asked.stub.ModelStatistics(request, timeout=ANSWER_S_MAX).model_stats
    assert told.inference_count == after["inference_count"]


def configuration(asked: ServerUnderTest) -> None:
    """the configuration names the tensors of the metadata, the same over REST and gRPC"""
    told = asked.get(f"/v2/models/{asked.model}/config")
    for side, tensors in (("input", "inputs"), ("output", "outputs")):
        names = [one["name"] for one in told[side]]
        assert names == [one["name"] for one in asked.metadata[tensors]]
    request = pb.ModelConfigRequest(name=asked.model)
    config = asked.stub.ModelConfig(request, timeout=ANSWER_S_MAX).config
    assert config.name == told["name"] == asked.model
    assert [one.name for one in config.input] == [one["name"] for one in told["input"]]
    assert [list(map(str, one.dims)) for one in config.output] == [
        list(map(str, one["dims"])) for one in told["output"]
    ]


def repository(asked: ServerUnderTest) -> None:
    """the repository's index names the model as READY, the same over REST and gRPC"""
    answer = asked.http.post("/v2/repository/index")
    index = [one for one in answer.json() if one["name"] == asked.model]
    assert "READY" in [one["state"] for one in index]
    told = asked.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=ANSWER_S_MAX)
    assert asked.model in [one.name for one in told.models]
