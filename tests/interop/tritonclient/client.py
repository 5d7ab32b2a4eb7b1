"""Calls a server of the Open Inference Protocol with NVIDIA's own client, in all its modes.

Runs in a virtual environment that has tritonclient, but not this project. Reads the requests as
JSON from stdin, and writes the results as JSON.
"""

import asyncio
import base64
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

WAIT_S_MAX = 60
REGION_BYTES = 8 << 20


def inputs_of(kind: Any, bags: dict[str, Any], **options: Any) -> list[Any]:
    """Returns the tensors F.ids and F.lengths of each feature F."""
    inputs = []
    for feature, of_feature in bags.items():
        ids = np.array([one for bag in of_feature for one in bag], np.int64)
        lengths = np.array([len(bag) for bag in of_feature], np.int32)
        for part, values, datatype in (("ids", ids, "INT64"), ("lengths", lengths, "INT32")):
            one = kind.InferInput(f"{feature}.{part}", list(values.shape), datatype)
            one.set_data_from_numpy(values, **options)
            inputs.append(one)
    return inputs


def outputs_of(kind: Any, names: list[str], **options: Any) -> list[Any] | None:
    return [kind.InferRequestedOutput(name, **options) for name in names] or None


def result_as_json(result: Any, names: list[str]) -> dict[str, Any]:
    """Returns the outputs as float32 bytes, with the other fields of the response."""
    response = result.get_response()
    if not isinstance(response, dict):
        response = {
            "model_name": response.model_name,
            "model_version": response.model_version,
            "id": response.id,
            "outputs": [{"name": one.name} for one in response.outputs],
        }
    output_names = [one["name"] for one in response["outputs"]]
    return {
        "model": response["model_name"],
        "version": response["model_version"],
        "id": response.get("id", ""),
        "outputs": {
            name: [list(result.as_numpy(name).shape), encoded(result.as_numpy(name))]
            for name in output_names
        },
    }


def encoded(values: np.ndarray) -> str:
    assert values.dtype == np.float32, values.dtype
    return base64.b64encode(values.tobytes()).decode()


def arguments(kind: Any, model: str, one: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the arguments of a call for the request ``one``."""
    return {
        "model_name": model,
        "inputs": inputs_of(kind, one["bags"], **options),
        "outputs": outputs_of(kind, one["outputs"], **options),
        "request_id": one["id"],
    }


def one_by_one(
    kind: Any, target: str, model: str, requested: list[dict[str, Any]], **options: Any
) -> list[Any]:
    with kind.InferenceServerClient(target) as client:
        return [
            result_as_json(client.infer(**arguments(kind, model, one, **options)), one["outputs"])
            for one in requested
        ]


def over_http_concurrently(target: str, model: str, requested: list[dict[str, Any]]) -> list[Any]:
    with triton_http.InferenceServerClient(target, concurrency=4) as client:
        waiting = [client.async_infer(**arguments(triton_http, model, one)) for one in requested]
        return [
            result_as_json(each.get_result(), one["outputs"])
            for each, one in zip(waiting, requested, strict=True)
        ]


async def over_aio(
    kind: Any, tensors: Any, target: str, model: str, requested: list[dict[str, Any]]
) -> list[Any]:
    """Sends requests with the ``tensors`` of one module through the asyncio client ``kind``."""
    async with kind.InferenceServerClient(target) as client:
        results = await asyncio.gather(
            *(client.infer(**arguments(tensors, model, one)) for one in requested)
        )
    return [
        result_as_json(result, one["outputs"])
        for result, one in zip(results, requested, strict=True)
    ]


def over_a_stream(target: str, model: str, requested: list[dict[str, Any]]) -> list[Any]:
    results: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(target) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        for one in requested:
            client.async_stream_infer(**arguments(triton_grpc, model, one))
        responses = []
        for one in requested:
            result, error = results.get(timeout=WAIT_S_MAX)
            responses.append(str(error) if error else result_as_json(result, one["outputs"]))
        client.stop_stream()
    return responses


def by_shared_memory(
    kind: Any, target: str, model: str, requested: list[dict[str, Any]], key: str
) -> dict[str, Any]:
    """Looks up ids from one shared-memory region, and receives vectors in another.

    Returns the results, with the server's description of the regions.
    """
    ids, vectors = (
        shared_memory.create_shared_memory_region(name, f"{key}-{name}", REGION_BYTES)
        for name in ("ids", "vectors")
    )
    try:
        with kind.InferenceServerClient(target) as client:
            client.unregister_system_shared_memory()
            for name in ("ids", "vectors"):
                client.register_system_shared_memory(name, f"{key}-{name}", REGION_BYTES)
            options: dict[str, bool] = {} if kind is triton_http else {"as_json": True}
            regions = client.get_system_shared_memory_status(**options)
            responses = [
                infer_in_shared_memory(kind, client, model, one, ids, vectors) for one in requested
            ]
            try:
                client.register_system_shared_memory("ids", f"{key}-ids", REGION_BYTES)
                again = ""
            except InferenceServerException as error:
                again = error.message()
            client.unregister_system_shared_memory("ids")
            client.unregister_system_shared_memory("vectors")
            left = client.get_system_shared_memory_status(**options)
    finally:
        shared_memory.destroy_shared_memory_region(ids)
        shared_memory.destroy_shared_memory_region(vectors)
    return {"answers": responses, "regions": regions, "again": again, "left": left}


def infer_in_shared_memory(
    kind: Any, client: Any, model: str, requested: dict[str, Any], ids: Any, vectors: Any
) -> dict[str, Any]:
    """Sends a request whose inputs are contiguous in one region, and its outputs in another."""
    inputs, offset = [], 0
    for feature, bags in requested["bags"].items():
        of_bags = np.array([one for bag in bags for one in bag], np.int64)
        lengths = np.array([len(bag) for bag in bags], np.int32)
        for part, values, datatype in (("ids", of_bags, "INT64"), ("lengths", lengths, "INT32")):
            if values.nbytes:
                shared_memory.set_shared_memory_region(ids, [values], offset=offset)
            one = kind.InferInput(f"{feature}.{part}", list(values.shape), datatype)
            one.set_shared_memory("ids", values.nbytes, offset=offset)
            inputs.append(one)
            offset += values.nbytes
    room = REGION_BYTES // len(requested["outputs"])
    outputs, offsets = [], {}
    for at, name in enumerate(requested["outputs"]):
        offsets[name] = at * room
        outputs.append(kind.InferRequestedOutput(name))
        outputs[-1].set_shared_memory("vectors", room, offset=offsets[name])
    result = client.infer(model, inputs, outputs=outputs, request_id=requested["id"])
    response = result.get_response()
    fields = ("model_name", "model_version", "id")
    found = [response[one] if kind is triton_http else getattr(response, one) for one in fields]
    response_json: dict[str, Any] = dict(
        zip(("model", "version", "id"), found, strict=True), outputs={}
    )
    for name, start in offsets.items():
        output = result.get_output(name)
        shape = output["shape"] if isinstance(output, dict) else list(output.shape)
        values = shared_memory.get_contents_as_numpy(vectors, np.float32, shape, offset=start)
        response_json["outputs"][name] = [list(shape), encoded(values)]
    return response_json


def described(http: str, grpc: str, model: str) -> dict[str, Any]:
    """Returns health, metadata, configuration, statistics and the index, over REST and gRPC."""
    with (
        triton_http.InferenceServerClient(http) as rest,
        triton_grpc.InferenceServerClient(grpc) as rpc,
    ):
        return {
            "ready": [
                requested()
                for client in (rest, rpc)
                for requested in (client.is_server_live, client.is_server_ready)
            ],
            "model_ready": [
                client.is_model_ready(*requested)
                for client in (rest, rpc)
                for requested in ((model,), (model, "1"), (model, "2"), ("nothing",))
            ],
            "server": [rest.get_server_metadata(), rpc.get_server_metadata(as_json=True)],
            "model": [rest.get_model_metadata(model), rpc.get_model_metadata(model, as_json=True)],
            "statistics": [
                rest.get_inference_statistics(model),
                rpc.get_inference_statistics(model, as_json=True),
            ],
            "configuration": [
                rest.get_model_config(model),
                rpc.get_model_config(model, as_json=True)["config"],
            ],
            "index": [
                rest.get_model_repository_index(),
                rpc.get_model_repository_index(as_json=True),
            ],
        }


def errors(http: str, grpc: str, model: str, bags: dict[str, Any]) -> list[list[str | None]]:
    """Returns (message, status) for a wrong output and an unserved version, over REST and gRPC."""
    found = []
    for kind, target in ((triton_http, http), (triton_grpc, grpc)):
        with kind.InferenceServerClient(target) as client:
            for names, version in ((["nothing"], ""), ([], "2")):
                try:
                    client.infer(
                        model,
                        inputs_of(kind, bags),
                        model_version=version,
                        outputs=outputs_of(kind, names),
                    )
                except InferenceServerException as error:
                    found.append([error.message(), error.status()])
    return found


def field_numbers() -> dict[str, Any]:
    """Returns the field numbers and types of every message of the .proto files, by full name."""
    numbers: dict[str, Any] = {}

    def add(message: Any) -> None:
        numbers[message.full_name] = {one.name: [one.number, one.type] for one in message.fields}
        for nested in message.nested_types:
            add(nested)

    for file in (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR):
        for message in file.message_types_by_name.values():
            add(message)
    return numbers


def main() -> None:
    parameters = json.load(sys.stdin)
    http, grpc, model, requested = (
        parameters["http"],
        parameters["grpc"],
        parameters["model"],
        parameters["requests"],
    )
    json.dump(
        {
            "answers": {
                "http": one_by_one(triton_http, http, model, requested, binary_data=True),
                "http, JSON": one_by_one(triton_http, http, model, requested, binary_data=False),
                "http, concurrent": over_http_concurrently(http, model, requested),
                "http, aio": asyncio.run(
                    over_aio(triton_http_aio, triton_http_aio, http, model, requested)
                ),
                "grpc": one_by_one(triton_grpc, grpc, model, requested),
                "grpc, aio": asyncio.run(
                    over_aio(triton_grpc_aio, triton_grpc, grpc, model, requested)
                ),
                "grpc, stream": over_a_stream(grpc, model, requested),
            },
            "streamed": over_a_stream(grpc, model, parameters["wrong"]),
            "described": described(http, grpc, model),
            "shared": {
                "http": by_shared_memory(
                    triton_http, http, model, parameters["placed"], parameters["key"]
                ),
                "grpc": by_shared_memory(
                    triton_grpc, grpc, model, parameters["placed"], parameters["key"]
                ),
            },
            "errors": errors(http, grpc, model, requested[0]["bags"]),
            "field_numbers": field_numbers(),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
