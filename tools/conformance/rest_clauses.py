"""Clauses of REST: functions whose docstrings state the clauses, as the report prints them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conformance.asked import BYTES_OF, ServerUnderTest, check_error, check_outputs

LENGTH_HEADER = "Inference-Header-Content-Length"
SHARED_MEMORY = "/v2/systemsharedmemory"
REGION_BYTES = 1 << 20


def server_metadata(asked: ServerUnderTest) -> None:
    """GET /v2 tells name, version and extensions"""
    told = asked.get("/v2")
    assert {"name", "version", "extensions"} <= told.keys()
    assert all(isinstance(one, str) for one in told["extensions"])


def health(asked: ServerUnderTest) -> None:
    """GET /v2/health/live and /v2/health/ready are answered 200"""
    asked.check_ready("/v2/health/live")
    asked.check_ready("/v2/health/ready")


def model_ready(asked: ServerUnderTest) -> None:
    """GET /v2/models/MODEL/ready is answered 200, of an unknown model 400 or 404"""
    asked.check_ready(f"/v2/models/{asked.model}/ready")
    answer = asked.http.get("/v2/models/no-such-model/ready")
    assert answer.status_code in (400, 404), f"status {answer.status_code}"


def model_metadata(asked: ServerUnderTest) -> None:
    """GET /v2/models/MODEL tells name, versions, platform, inputs and outputs"""
    asked.metadata = asked.get(f"/v2/models/{asked.model}")
    assert asked.metadata["name"] == asked.model
    assert asked.metadata["platform"]
    for one in (*asked.metadata["inputs"], *asked.metadata["outputs"]):
        assert one.keys() == {"name", "datatype", "shape"}
        assert one["datatype"] in BYTES_OF
        assert all(size == -1 or size > 0 for size in one["shape"])


def versions(asked: ServerUnderTest) -> None:
    """a version of the metadata is found under …/versions/VERSION, and another is not"""
    (version, *_) = asked.metadata["versions"]
    path = f"/v2/models/{asked.model}/versions"
    assert asked.get(f"{path}/{version}")["name"] == asked.model
    asked.check_ready(f"{path}/{version}/ready")
    answer = asked.infer(asked.body(), f"{path}/{version}/infer")
    assert answer.json()["model_version"] == version
    check_error(asked.http.get(f"{path}/987654321"), 400, 404)
    check_error(asked.infer(asked.body(), f"{path}/987654321/infer"), 400, 404)


def infer_json(asked: ServerUnderTest) -> None:
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


def infer_selection(asked: ServerUnderTest) -> None:
    """the request's outputs select, and an unknown one is refused"""
    for one in asked.metadata["outputs"]:
        answer = asked.infer(asked.body(outputs=[{"name": one["name"]}]))
        assert [told["name"] for told in answer.json()["outputs"]] == [one["name"]]
    check_error(asked.infer(asked.body(outputs=[{"name": "no such output"}])), 400)


def infer_binary(asked: ServerUnderTest) -> None:
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


def infer_binary_per_output(asked: ServerUnderTest) -> None:
    """binary_data of an output, of a request whose inputs are JSON"""
    name = asked.metadata["outputs"][0]["name"]
    body = asked.body(outputs=[{"name": name, "parameters": {"binary_data": True}}])
    answer = asked.infer(body)
    end = int(answer.headers[LENGTH_HEADER])
    (told,) = json.loads(answer.content[:end])["outputs"]
    assert "data" not in told
    assert told["parameters"]["binary_data_size"] == len(answer.content) - end


def infer_errors(asked: ServerUnderTest) -> None:
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


def shared_memory(asked: ServerUnderTest) -> None:
    """a region of shared memory is registered, told, read, written and unregistered"""
    assert "system_shared_memory" in asked.get("/v2")["extensions"]
    name = f"conformance-{os.getpid()}"
    path, region = f"{SHARED_MEMORY}/region/{name}", {"shared_memory_region": name}
    told = {"key": f"{asked.key_prefix}{name}", "offset": 0, "byte_size": REGION_BYTES}
    file = Path("/dev/shm" + told["key"])  # type: ignore[operator]
    file.write_bytes(b"\xff" * REGION_BYTES)
    try:
        assert asked.http.post(f"{path}/register", json=told).status_code == 200
        assert asked.get(f"{path}/status") == [{"name": name, **told}]
        check_error(asked.http.post(f"{path}/register", json=told), 400, 409)
        inputs, lengths = asked.body()["inputs"], b""
        for one in inputs:
            if one["data"]:
                size = len(one.pop("data")) * BYTES_OF[one["datatype"]]
                place = {"shared_memory_offset": len(lengths), "shared_memory_byte_size": size}
                one["parameters"] = region | place
                lengths += bytes(size)
        with file.open("r+b") as opened:
            opened.write(lengths)
        offset, room = REGION_BYTES // 2, REGION_BYTES // 4
        place = {"shared_memory_offset": offset, "shared_memory_byte_size": room}
        name_of_output = asked.metadata["outputs"][0]["name"]
        outputs = [{"name": name_of_output, "parameters": region | place}]
        answer = asked.infer({"inputs": inputs, "outputs": outputs})
        assert answer.status_code == 200, answer.text
        (output,) = answer.json()["outputs"]
        check_outputs(asked, [output])
        assert "data" not in output
        nbytes = output["shape"][0] * output["shape"][1] * BYTES_OF[output["datatype"]]
        assert output.get("parameters") in (
            None,
            {
                **region,
                "shared_memory_offset": offset,
                "shared_memory_byte_size": nbytes,
            },
        )
        written = file.read_bytes()[offset : offset + room]
        assert written == bytes(nbytes) + b"\xff" * (room - nbytes), "other bytes are written"
        assert asked.http.post(f"{path}/unregister").status_code == 200
        check_error(asked.infer({"inputs": inputs, "outputs": outputs}), 400, 404)
        assert asked.get(f"{SHARED_MEMORY}/status") == []
    finally:
        file.unlink()
        asked.http.post(f"{path}/unregister")
