"""Helpers of the tests of shared memory: read the client's calls and build responses, over REST and
gRPC."""

import json
import os
from typing import Any, ClassVar

import grpc
import httpx
import pytest
from google.protobuf.json_format import ParseDict

from embedserve_client import EmbedServeClientError
from embedserve_client.grpc.calls import Rpc, grpc_errors
from embedserve_client.grpc.requests import GrpcRequests
from embedserve_client.rest.calls import Call
from embedserve_client.rest.requests import RestRequests
from embedserve_proto import open_inference_pb2 as pb

PREFIX = f"/embedserve-test-steps-{os.getpid()}-"
Calls = RestRequests | GrpcRequests


class Rest:
    """Fields of REST calls, and a server's responses to them."""

    make_requests = staticmethod(lambda: RestRequests(10.0, PREFIX))

    @staticmethod
    def path(call: Call[Any]) -> str:
        """Returns the last part of the URL path, without the name of a region."""
        is_region = call.path.startswith("/v2/systemsharedmemory/region/")
        return call.path.rpartition("/")[2] if is_region else call.path

    @staticmethod
    def routing_key(call: Call[Any]) -> str:
        return call.headers["x-routing-key"]

    @staticmethod
    def request_tensors(call: Call[Any]) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(call.content or b"")
        return body

    @staticmethod
    def read_response(call: Call[Any], answer: dict[str, Any]) -> Any:
        return call.read(json.dumps(answer).encode())

    @staticmethod
    def error(call: Call[Any], status: int, message: str, **headers: str) -> EmbedServeClientError:
        with pytest.raises(EmbedServeClientError) as caught:
            call.result(httpx.Response(status, json={"error": message}, headers=headers))
        return caught.value


class RejectedCall(grpc.RpcError):  # type: ignore[misc]
    """An RPC error with the interface of grpc's own."""

    def __init__(self, code: grpc.StatusCode, message: str, metadata: dict[str, str]) -> None:
        self._code, self._message, self._metadata = code, message, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._message

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._metadata.items())


class Grpc:
    """Fields of gRPC calls, and a server's responses to them."""

    CODES: ClassVar = {
        400: grpc.StatusCode.INVALID_ARGUMENT,
        401: grpc.StatusCode.UNAUTHENTICATED,
        403: grpc.StatusCode.PERMISSION_DENIED,
        404: grpc.StatusCode.NOT_FOUND,
        409: grpc.StatusCode.FAILED_PRECONDITION,
        413: grpc.StatusCode.RESOURCE_EXHAUSTED,
        429: grpc.StatusCode.RESOURCE_EXHAUSTED,
        503: grpc.StatusCode.UNAVAILABLE,
    }

    @staticmethod
    def make_requests() -> GrpcRequests:
        return GrpcRequests(grpc.insecure_channel("127.0.0.1:1"), 10.0, PREFIX)

    @staticmethod
    def path(call: Rpc[Any]) -> str:
        if isinstance(call.request, pb.ModelInferRequest):
            return f"/v2/models/{call.request.model_name}/infer"
        is_register = isinstance(call.request, pb.SystemSharedMemoryRegisterRequest)
        return "register" if is_register else "/embed"

    @staticmethod
    def routing_key(call: Rpc[Any]) -> str:
        return call.metadata["x-routing-key"]

    @staticmethod
    def request_tensors(call: Rpc[Any]) -> dict[str, Any]:
        return {
            "inputs": [
                tensor_fields(one) | {"datatype": one.datatype, "shape": list(one.shape)}
                for one in call.request.inputs
            ],
            "outputs": [tensor_fields(one) for one in call.request.outputs],
        }

    @staticmethod
    def read_response(call: Rpc[Any], answer: dict[str, Any]) -> Any:
        outputs = [
            one
            | {
                "parameters": {
                    name: {"string_param": value} for name, value in one["parameters"].items()
                }
            }
            for one in answer["outputs"]
        ]
        parameters = {
            name: {"int64_param": number} for name, number in answer.get("parameters", {}).items()
        }
        answer |= {"outputs": outputs, "parameters": parameters}
        return call.read(ParseDict(answer, pb.ModelInferResponse()))

    @classmethod
    def error(
        cls, call: Rpc[Any], status: int, message: str, **headers: str
    ) -> EmbedServeClientError:
        metadata = {name.lower(): value for name, value in headers.items()}
        is_register = cls.path(call) == "register"
        code = cls.CODES[status]
        if is_register and status == httpx.codes.NOT_FOUND:
            code = grpc.StatusCode.UNIMPLEMENTED
        if status == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
            metadata["embedserve-field"] = "inputs"
            message += ", the limit is 7"
        with pytest.raises(EmbedServeClientError) as caught, grpc_errors(call.read_error):
            raise RejectedCall(code, message, metadata)
        return caught.value


def tensor_fields(one: Any) -> dict[str, Any]:
    """Returns the name and parameters of a tensor of a message, without its values."""
    parameters = {
        name: value.string_param or value.int64_param for name, value in one.parameters.items()
    }
    return {"name": one.name, "parameters": parameters}


PROTOCOLS: dict[str, Any] = {"rest": Rest, "grpc": Grpc}


def protocol_of(call: Any) -> Any:
    return Rest if isinstance(call, Call) else Grpc


def path(call: Any) -> str:
    return str(protocol_of(call).path(call))
