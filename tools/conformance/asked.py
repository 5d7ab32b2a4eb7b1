"""Provides the server under test to the clauses: its metadata, requests, and shared checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from embedserve_proto import open_inference_pb2 as pb
from embedserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

ANSWER_S_MAX = 30
EXAMPLES = 2
BYTES_OF: dict[str, int] = {"INT64": 8, "INT32": 4, "FP32": 4, "FP16": 2, "BYTES": 0}


@dataclass
class ServerUnderTest:
    """A server under test, with the metadata of its model."""

    http: httpx.Client
    grpc: grpc.Channel
    model: str
    key_prefix: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def stub(self) -> GRPCInferenceServiceStub:
        return GRPCInferenceServiceStub(self.grpc)

    def get(self, path: str, status: int = 200) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == status, f"{path} is answered {answer.status_code}"
        assert answer.headers["content-type"].startswith("application/json")
        return answer.json()

    def check_ready(self, path: str) -> None:
        """Checks the status only, because the protocol defines no body."""
        answer = self.http.get(path)
        assert answer.status_code == 200, f"{path} is answered {answer.status_code}"

    def inputs(self) -> list[dict[str, Any]]:
        """Returns every input with the smallest shape that is valid."""
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
    """Returns the shape of an output in the metadata, for EXAMPLES examples."""
    return [EXAMPLES if size == -1 else size for size in output["shape"]]


def check_outputs(asked: ServerUnderTest, outputs: list[dict[str, Any]]) -> None:
    told = {one["name"]: one for one in asked.metadata["outputs"]}
    for one in outputs:
        assert one["name"] in told, f"output {one['name']!r} is not in the metadata"
        assert one["datatype"] == told[one["name"]]["datatype"]
        assert list(one["shape"]) == shape_of(told[one["name"]]), one["shape"]


def check_error(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in statuses, f"status {answer.status_code}: {answer.text}"
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
