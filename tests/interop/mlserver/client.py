"""Calls a server of the Open Inference Protocol like MLServer's callers do.

Uses `mlserver infer`, and MLServer's types, codecs and gRPC stub. Runs in a virtual environment
that has mlserver, but not this project. Reads the requests as JSON from stdin, and writes the
results as JSON.
"""

import base64
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from mlserver.codecs import NumpyCodec
from mlserver.grpc.converters import ModelInferRequestConverter, ModelInferResponseConverter
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
from mlserver.types import InferenceRequest, InferenceResponse

INFER_S_MAX = 60


def request_of(requested: dict[str, Any]) -> InferenceRequest:
    """Returns a request with the tensors F.ids and F.lengths of each feature F."""
    inputs = []
    for feature, bags in requested["bags"].items():
        ids = np.array([one for bag in bags for one in bag], np.int64)
        lengths = np.array([len(bag) for bag in bags], np.int32)
        for part, values in (("ids", ids), ("lengths", lengths)):
            tensor = NumpyCodec.encode_input(f"{feature}.{part}", values)
            tensor.shape = list(values.shape)  # the codec takes it for a matrix
            inputs.append(tensor)
    return InferenceRequest(id=requested["id"], inputs=inputs)


def response_as_json(response: InferenceResponse) -> dict[str, Any]:
    """Returns the outputs as float32 bytes, with the other fields of the response."""
    outputs = {}
    for one in response.outputs:
        values = NumpyCodec.decode_output(one)
        outputs[one.name] = [list(one.shape), base64.b64encode(values.tobytes()).decode()]
        assert values.dtype == np.float32, values.dtype
    return {"model": response.model_name, "id": response.id, "outputs": outputs}


def by_command(target: str, model: str, requests: list[InferenceRequest]) -> list[dict[str, Any]]:
    """Runs `mlserver infer`, which writes responses in the order of their arrival."""
    with tempfile.TemporaryDirectory() as folder:
        requested, responses = Path(folder) / "requests", Path(folder) / "responses"
        requested.write_text("".join(f"{one.model_dump_json()}\n" for one in requests))
        command = [str(Path(sys.executable).with_name("mlserver")), "infer", "-u", target]
        command += ["-m", model, "-i", str(requested), "-o", str(responses)]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=INFER_S_MAX)
        lines = responses.read_text().splitlines()
    return [response_as_json(InferenceResponse.model_validate_json(line)) for line in lines]


def by_stub(target: str, model: str, requests: list[InferenceRequest]) -> list[dict[str, Any]]:
    responses = []
    with grpc.insecure_channel(target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for one in requests:
            message = ModelInferRequestConverter.from_types(one, model_name=model)
            reply = stub.ModelInfer(message, timeout=INFER_S_MAX)
            responses.append(response_as_json(ModelInferResponseConverter.to_types(reply)))
    return responses


def main() -> None:
    parameters = json.load(sys.stdin)
    requests = [request_of(one) for one in parameters["requests"]]
    json.dump(
        {
            "command": by_command(parameters["http"], parameters["model"], requests),
            "stub": by_stub(parameters["grpc"], parameters["model"], requests),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
