"""Calls a server of the Open Inference Protocol with KServe's own clients, over REST and gRPC.

Runs in a virtual environment that has kserve, but not this project. Reads the requests as JSON from
stdin, and writes the results as JSON.
"""

import asyncio
import base64
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig


def request_of(model: str, requested: dict[str, Any], *, is_binary: bool) -> InferRequest:
    """Returns a request with the tensors F.ids and F.lengths of each feature F."""
    inputs = []
    for feature, bags in requested["bags"].items():
        ids = np.array([one for bag in bags for one in bag], np.int64)
        lengths = np.array([len(bag) for bag in bags], np.int32)
        for part, values, datatype in (("ids", ids, "INT64"), ("lengths", lengths, "INT32")):
            one = InferInput(f"{feature}.{part}", list(values.shape), datatype)
            one.set_data_from_numpy(values, binary_data=is_binary)
            inputs.append(one)
    return InferRequest(model_name=model, infer_inputs=inputs, request_id=requested["id"])


def response_as_json(response: Any) -> dict[str, Any]:
    """Returns the outputs as float32 bytes, with the other fields of the response."""
    outputs = {}
    for one in response.outputs:
        values = one.as_numpy()
        assert values.dtype == np.float32, values.dtype
        outputs[one.name] = [list(values.shape), base64.b64encode(values.tobytes()).decode()]
    return {
        "model": response.model_name,
        "version": response.model_version,
        "id": response.id,
        "outputs": outputs,
    }


async def over_rest(url: str, model: str, parameters: dict[str, Any]) -> dict[str, Any]:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    responses = {}
    for name, is_binary in (("REST, JSON", False), ("REST, binary", True)):
        responses[name] = [
            response_as_json(
                await client.infer(url, request_of(model, one, is_binary=is_binary), model)
            )
            for one in parameters["requests"]
        ]
    ready = [await client.is_server_live(url), await client.is_server_ready(url)]
    ready += [await client.is_model_ready(url, one) for one in (model, "nothing")]
    wrong = request_of(model, parameters["wrong"], is_binary=True)
    error = await error_of(client.infer(url, wrong, model))
    await client.close()
    return {"answers": responses, "ready": ready, "error": error}


async def over_grpc(target: str, model: str, parameters: dict[str, Any]) -> dict[str, Any]:
    client = InferenceGRPCClient(target)
    responses = {}
    for name, is_raw in (("gRPC, typed", False), ("gRPC, raw", True)):
        responses[name] = [
            response_as_json(await client.infer(request_of(model, one, is_binary=is_raw)))
            for one in parameters["requests"]
        ]
    ready = [await client.is_server_live(), await client.is_server_ready()]
    ready += [await client.is_model_ready(one) for one in (model, "nothing")]
    error = await error_of(client.infer(request_of(model, parameters["wrong"], is_binary=True)))
    await client.close()
    return {"answers": responses, "ready": ready, "error": error}


async def error_of(requested: Any) -> str:
    """Returns the error that a call raises, or ""."""
    try:
        await requested
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


async def main() -> None:
    parameters = json.load(sys.stdin)
    rest = await over_rest(parameters["http"], parameters["model"], parameters)
    grpc = await over_grpc(parameters["grpc"], parameters["model"], parameters)
    json.dump({"REST": rest, "gRPC": grpc}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
