"""Whether a server speaks the Open Inference Protocol, version 2: each clause asked for, over REST
and gRPC, and a line for each.

    python tests/interop/conformance/open_inference.py --model movies

What a request may hold is told by the model's own metadata. Every input is sent empty, for two
examples, so that any model of embedserve answers it; of other servers only the clauses that need no
inference say anything. Ends with 1 where a clause is not kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "proto"))

import grpc
import httpx

from embedserve_proto import open_inference_pb2 as pb
from embedserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

ANSWER_S_MAX = 30
EXAMPLES = 2
LENGTH_HEADER = "Inference-Header-Content-Length"
BYTES_OF: dict[str, int] = {"INT64": 8, "INT32": 4, "FP32": 4, "FP16": 2, "BYTES": 0}


@dataclass
class Asked:
    """The server, and what its metadata say of the model."""

    http: httpx.Client
    grpc: grpc.Channel
    model: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def stub(self) -> GRPCInferenceServiceStub:
        return GRPCInferenceServiceStub(self.grpc)

    def get(self, path: str, status: int = 200) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == status, f"{path} is answered {answer.status_code}"
        assert answer.headers["content-type"].startswith("application/json")
        return answer.json()

    def inputs(self) -> list[dict[str, Any]]:
        """Every input, as empty as it may be."""
        inputs = []
        for one in self.metadata["inputs"]:
            is_lengths = one["name"].endswith(".lengths")
            shape = [EXAMPLES if is_lengths else 0]
            inputs.append({"name": one["name"], "datatype": one["datatype"], "shape": shape})
        return inputs

    def body(self, **more: Any) -> dict[str, Any]:
        inputs = [one | {"data": [0] * one["shape"][0]} for one in self.inputs()]
        return {"inputs": inputs, **more}

    def infer(self, body: Any, path: str = "", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = path or f"/v2/models/{self.model}/infer"
        return self.http.post(path, content=content, headers=headers)

    def message(self, *, is_raw: bool = True, **more: Any) -> pb.ModelInferRequest:
        message = pb.ModelInferRequest(model_name=self.model, **more)
        for one in self.inputs():
            tensor = message.inputs.add(**one)
            count = one["shape"][0]
            if is_raw:
                message.raw_input_contents.append(bytes(count * BYTES_OF[one["datatype"]]))
            elif one["datatype"] == "INT32":
                tensor.contents.int_contents.extend([0] * count)
        return message


def shape_of(output: dict[str, Any]) -> list[int]:
    """As the metadata say it, with the examples that are asked for."""
    return [EXAMPLES if size == -1 else size for size in output["shape"]]


def check_outputs(asked: Asked, outputs: list[dict[str, Any]]) -> None:
    told = {one["name"]: one for one in asked.metadata["outputs"]}
    for one in outputs:
        assert one["name"] in told, f"output {one['name']!r} is not in the metadata"
        assert one["datatype"] == told[one["name"]]["datatype"]
        assert list(one["shape"]) == shape_of(told[one["name"]]), one["shape"]


def check_error(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in statuses, f"status {answer.status_code}"
    told = answer.json()
    assert list(told) == ["error"], f"the error is {told}"
    assert isinstance(told["error"], str)
    assert told["error"]


def check_status(code: grpc.StatusCode, call: Callable[[], Any]) -> None:
    try:
        call()
    except grpc.RpcError as error:
        said = error.code()
    else:
        said = grpc.StatusCode.OK
    assert said is code, f"status {said}"


# Clauses: each a function whose docstring says it


def server_metadata(asked: Asked) -> None:
    """GET /v2 tells name, version and extensions"""
    told = asked.get("/v2")
    assert {"name", "version", "extensions"} <= told.keys()
    assert all(isinstance(one, str) for one in told["extensions"])


def health(asked: Asked) -> None:
    """GET /v2/health/live and /v2/health/ready are answered 200"""
    asked.get("/v2/health/live")
    asked.get("/v2/health/ready")


def model_ready(asked: Asked) -> None:
    """GET /v2/models/MODEL/ready is answered 200, of an unknown model 4xx with an error"""
    asked.get(f"/v2/models/{asked.model}/ready")
    check_error(asked.http.get("/v2/models/no-such-model/ready"), 400, 404)


def model_metadata(asked: Asked) -> None:
    """GET /v2/models/MODEL tells name, versions, platform, inputs and outputs"""
    asked.metadata = asked.get(f"/v2/models/{asked.model}")
    assert asked.metadata["name"] == asked.model
    assert asked.metadata["platform"]
    for one in (*asked.metadata["inputs"], *asked.metadata["outputs"]):
        assert one.keys() == {"name", "datatype", "shape"}
        assert one["datatype"] in BYTES_OF
        assert all(size == -1 or size > 0 for size in one["shape"])


def versions(asked: Asked) -> None:
    """a version that is told is found under …/versions/VERSION, and another is not"""
    (version, *_) = asked.metadata["versions"]
    path = f"/v2/models/{asked.model}/versions"
    assert asked.get(f"{path}/{version}")["name"] == asked.model
    asked.get(f"{path}/{version}/ready")
    answer = asked.infer(asked.body(), f"{path}/{version}/infer")
    assert answer.json()["model_version"] == version
    check_error(asked.http.get(f"{path}/987654321"), 400, 404)
    check_error(asked.infer(asked.body(), f"{path}/987654321/infer"), 400, 404)


def infer_json(asked: Asked) -> None:
    """POST …/infer answers model_name and outputs as the metadata say, and gives the id back"""
    answer = asked.infer(asked.body(id="request 7"))
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["model_name"], told["id"]) == (asked.model, "request 7")
    assert told["outputs"]
    check_outputs(asked, told["outputs"])
    for one in told["outputs"]:
        count = 1
        for size in one["shape"]:
            count *= size
        assert len(one["data"]) == count, "data is not as many values as its shape says"


def infer_selection(asked: Asked) -> None:
    """the request's outputs select, and an unknown one is refused"""
    for one in asked.metadata["outputs"]:
        answer = asked.infer(asked.body(outputs=[{"name": one["name"]}]))
        assert [told["name"] for told in answer.json()["outputs"]] == [one["name"]]
    check_error(asked.infer(asked.body(outputs=[{"name": "no such output"}])), 400)


def infer_binary(asked: Asked) -> None:
    """tensors in binary behind the JSON, both ways, with Inference-Header-Content-Length"""
    inputs, data = [], b""
    for one in asked.inputs():
        raw = bytes(one["shape"][0] * BYTES_OF[one["datatype"]])
        inputs.append(one | {"parameters": {"binary_data_size": len(raw)}})
        data += raw
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    answer = asked.infer(head + data, **{LENGTH_HEADER: str(len(head))})
    assert answer.status_code == 200, answer.text
    end = int(answer.headers[LENGTH_HEADER])
    told, rest = json.loads(answer.content[:end]), answer.content[end:]
    check_outputs(asked, told["outputs"])
    sizes = [one["parameters"]["binary_data_size"] for one in told["outputs"]]
    assert sum(sizes) == len(rest)
    for one, size in zip(told["outputs"], sizes, strict=True):
        assert size == one["shape"][0] * one["shape"][1] * BYTES_OF[one["datatype"]]
    check_error(asked.infer(head + data[:-1], **{LENGTH_HEADER: str(len(head))}), 400)
    check_error(asked.infer(head + data, **{LENGTH_HEADER: str(len(head + data) + 1)}), 400)


def infer_binary_per_output(asked: Asked) -> None:
    """binary_data of an output, of a request whose inputs are JSON"""
    name = asked.metadata["outputs"][0]["name"]
    body = asked.body(outputs=[{"name": name, "parameters": {"binary_data": True}}])
    answer = asked.infer(body)
    end = int(answer.headers[LENGTH_HEADER])
    (told,) = json.loads(answer.content[:end])["outputs"]
    assert "data" not in told
    assert told["parameters"]["binary_data_size"] == len(answer.content) - end


def infer_errors(asked: Asked) -> None:
    """wrong requests are answered 400 with {"error": "…"}"""
    for body in (b"", b"{", b"[]", {"inputs": 7}, {"inputs": [{"name": "x"}]}):
        check_error(asked.infer(body), 400)
    wrong = asked.body()
    wrong["inputs"][0]["datatype"] = "FP64"
    check_error(asked.infer(wrong), 400)
    wrong = asked.body()
    wrong["inputs"][0]["shape"] = [7]
    check_error(asked.infer(wrong), 400)
    check_error(asked.infer(asked.body(), "/v2/models/no-such-model/infer"), 400, 404)


def rpc_health(asked: Asked) -> None:
    """ServerLive, ServerReady and ModelReady"""
    assert asked.stub.ServerLive(pb.ServerLiveRequest(), timeout=ANSWER_S_MAX).live
    assert asked.stub.ServerReady(pb.ServerReadyRequest(), timeout=ANSWER_S_MAX).ready
    request = pb.ModelReadyRequest(name=asked.model)
    assert asked.stub.ModelReady(request, timeout=ANSWER_S_MAX).ready


def rpc_metadata(asked: Asked) -> None:
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


def check_message(asked: Asked, answer: pb.ModelInferResponse) -> None:
    outputs: list[dict[str, Any]] = [
        {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
        for one in answer.outputs
    ]
    check_outputs(asked, outputs)
    sizes = [len(raw) for raw in answer.raw_output_contents]
    assert sizes == [one["shape"][0] * one["shape"][1] * 4 for one in outputs]


def rpc_infer(asked: Asked) -> None:
    """ModelInfer with raw and with typed contents, and not with both"""
    for is_raw in (True, False):
        message = asked.message(is_raw=is_raw, id="request 7")
        answer = asked.stub.ModelInfer(message, timeout=ANSWER_S_MAX)
        assert (answer.model_name, answer.id) == (asked.model, "request 7")
        check_message(asked, answer)
    mixed = asked.message()
    mixed.inputs[0].contents.int64_contents.append(1)
    check_status(grpc.StatusCode.INVALID_ARGUMENT, lambda: asked.stub.ModelInfer(mixed))


def rpc_errors(asked: Asked) -> None:
    """ModelInfer of an unknown model, version or output ends with its status"""
    for code, wrong in (
        (grpc.StatusCode.NOT_FOUND, pb.ModelInferRequest(model_name="no-such-model")),
        (grpc.StatusCode.NOT_FOUND, pb.ModelInferRequest(model_version="987654321")),
        (grpc.StatusCode.INVALID_ARGUMENT, pb.ModelInferRequest(outputs=[{"name": "nothing"}])),
    ):
        message = asked.message()
        message.MergeFrom(wrong)
        check_status(code, lambda message=message: asked.stub.ModelInfer(message))  # type: ignore[misc]


def rpc_stream(asked: Asked) -> None:
    """ModelStreamInfer answers in order, and a wrong request by error_message in its place"""

    def messages() -> Iterator[pb.ModelInferRequest]:
        yield asked.message(id="first")
        yield asked.message(id="wrong", outputs=[{"name": "no such output"}])
        yield asked.message(id="last")

    first, wrong, last = asked.stub.ModelStreamInfer(messages(), timeout=ANSWER_S_MAX)
    assert [one.infer_response.id for one in (first, last)] == ["first", "last"]
    check_message(asked, last.infer_response)
    assert wrong.error_message


def statistics(asked: Asked) -> None:
    """statistics count examples and batches, the same over REST and gRPC"""
    (before,) = asked.get(f"/v2/models/{asked.model}/stats")["model_stats"]
    asked.infer(asked.body())
    (after,) = asked.get(f"/v2/models/{asked.model}/stats")["model_stats"]
    assert after["inference_count"] == before["inference_count"] + EXAMPLES
    assert after["execution_count"] > before["execution_count"]
    request = pb.ModelStatisticsRequest(name=asked.model)
    (told,) = asked.stub.ModelStatistics(request, timeout=ANSWER_S_MAX).model_stats
    assert told.inference_count == after["inference_count"]


def repository(asked: Asked) -> None:
    """the repository's index names the model as READY, the same over REST and gRPC"""
    answer = asked.http.post("/v2/repository/index")
    index = [one for one in answer.json() if one["name"] == asked.model]
    assert "READY" in [one["state"] for one in index]
    told = asked.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=ANSWER_S_MAX)
    assert asked.model in [one.name for one in told.models]


CLAUSES: tuple[Callable[[Asked], None], ...] = (
    server_metadata,
    health,
    model_ready,
    model_metadata,
    versions,
    infer_json,
    infer_selection,
    infer_binary,
    infer_binary_per_output,
    infer_errors,
    rpc_health,
    rpc_metadata,
    rpc_infer,
    rpc_errors,
    rpc_stream,
    statistics,
    repository,
)


def said(asked: Asked, clause: Callable[[Asked], None]) -> str:
    """What is wrong with it; "" if nothing is."""
    try:
        clause(asked)
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else repr(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--http", default="localhost:8000", help="HOST:PORT of REST")
    parser.add_argument("--grpc", default="localhost:8001", help="HOST:PORT of gRPC")
    parser.add_argument("--model", required=True)
    given = parser.parse_args()
    wrong = 0
    with (
        httpx.Client(base_url=f"http://{given.http}", timeout=ANSWER_S_MAX) as http,
        grpc.insecure_channel(given.grpc) as channel,
    ):
        asked = Asked(http, channel, given.model)
        for clause in CLAUSES:
            problem = said(asked, clause)
            wrong += bool(problem)
            result = f"FAILED: {problem}" if problem else "ok"
            print(f"{clause.__name__:24} {clause.__doc__}: {result}")
    print(f"{len(CLAUSES) - wrong} of {len(CLAUSES)} clauses are kept")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
