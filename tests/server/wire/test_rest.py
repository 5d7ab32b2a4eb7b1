"""Tests of POST /embed without a network: formats, headers, and every error in one JSON format."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine, model_info
from server.live import JSON, PROTOBUF, make_pipeline
from server.raw_http import OurServer, http_client, read_response
from server.waiting import until

from embedserve_proto import embedding_pb2 as pb

BAGS: Bags = {"tag": [[1], [2, 3]], "user": [[4], []]}
AS_JSON = json.dumps({"features": BAGS}).encode()
AS_PROTOBUF = pb.EmbedRequest(
    keys=["tag", "user"], ids=[1, 2, 3, 4], lengths=[1, 2, 1, 0]
).SerializeToString()


def values_of(response: httpx.Response) -> np.ndarray:
    """Returns the values of a response in either format."""
    if response.headers["content-type"] == PROTOBUF:
        message = pb.EmbedResponse.FromString(response.content)
        return np.frombuffer(message.values, "<f4").reshape(message.batch_size, -1)
    return np.array(response.json()["values"], np.float32)


def error_of(response: httpx.Response) -> dict[str, str]:
    """Checks the format of an error response; returns the error."""
    assert response.headers["content-type"] == JSON
    assert response.json().keys() == {"error"}
    error: dict[str, str] = response.json()["error"]
    assert error.keys() == {"code", "message", "field"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("content_type", "accept", "response_type"),
    [
        (None, None, JSON),
        (None, "*/*", JSON),
        (JSON, JSON, JSON),
        (f"{JSON}; charset=utf-8", "application/json, text/plain, */*", JSON),
        ("application/x-www-form-urlencoded", "*/*", JSON),  # sent by curl -d
        (JSON, PROTOBUF, PROTOBUF),
        (PROTOBUF, None, PROTOBUF),
        (PROTOBUF, "*/*", PROTOBUF),
        (PROTOBUF, PROTOBUF, PROTOBUF),
        (PROTOBUF, JSON, JSON),
        (PROTOBUF.upper(), PROTOBUF.upper(), PROTOBUF),
        (JSON, f"{PROTOBUF};q=0, */*", JSON),
        (JSON, f"{PROTOBUF}; q=0.0;x=1,{JSON};q=0.5", JSON),
        (PROTOBUF, f"{JSON};q=0.1, {PROTOBUF};q=0", JSON),
        (JSON, f"{PROTOBUF};q=0.9", PROTOBUF),
        (PROTOBUF, f"{PROTOBUF};q=0.5, {JSON}", JSON),
        (PROTOBUF, f"{PROTOBUF};q=0.5, {JSON}; Q=0.500", PROTOBUF),
        (PROTOBUF, f"{PROTOBUF};q=0.25, {JSON};q=0.2, {JSON};q=0.3", JSON),
    ],
)
@pytest.mark.parametrize("path", ["/embed", "/models/shop/embed"])
async def test_request_and_response_formats(
    rest: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    content_type: str | None,
    accept: str | None,
    response_type: str,
) -> None:
    del rest.headers["accept"]
    headers = {"content-type": content_type, "accept": accept}
    body = AS_PROTOBUF if content_type in (PROTOBUF, PROTOBUF.upper()) else AS_JSON
    response = await rest.post(
        path, content=body, headers={k: v for k, v in headers.items() if v is not None}
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == response_type
    assert int(response.headers["content-length"]) == len(response.content)
    assert np.array_equal(values_of(response), engine.expected(BAGS))


async def test_several_accept_lines_form_one_list(rest: httpx.AsyncClient) -> None:
    del rest.headers["accept"]
    headers = [("accept", PROTOBUF), ("accept", "*/*")]
    response = await rest.post("/embed", content=AS_JSON, headers=headers)
    assert response.headers["content-type"] == PROTOBUF


async def test_identity_encoding_is_accepted_in_any_case(rest: httpx.AsyncClient) -> None:
    headers = {"content-encoding": "Identity"}
    assert (await rest.post("/embed", content=AS_JSON, headers=headers)).is_success


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/embed", "/models/shop/embed"])
async def test_only_post_is_allowed(rest: httpx.AsyncClient, method: str, path: str) -> None:
    response = await rest.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.headers["content-type"] == JSON
    if method != "HEAD":  # responses to HEAD have no body
        assert error_of(response)["message"] == f"method is {method}: send a POST"


@pytest.mark.parametrize("path", ["/nothing", "/embed/", "/models//embed", "/models/a/b/embed"])
async def test_unknown_path_error_has_the_common_format(rest: httpx.AsyncClient, path: str) -> None:
    response = await rest.post(path, content=AS_JSON)
    assert response.status_code == 404
    assert error_of(response)["code"] == "NOT_FOUND"


async def test_model_of_the_url_overrides_that_of_the_message(
    rest: httpx.AsyncClient,
) -> None:
    body = pb.EmbedRequest(model="shoes", keys=["user"], lengths=[0]).SerializeToString()
    headers = {"content-type": PROTOBUF}
    assert (await rest.post("/models/shop/embed", content=body, headers=headers)).is_success
    assert (await rest.post("/embed", content=body, headers=headers)).status_code == 404


async def test_oversized_body_is_rejected_before_its_end(server: OurServer) -> None:
    reader, writer = await server.open()
    head = b"POST /embed HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"258\r\n%b\r\n" % bytes(600)
    writer.write(head + chunk)
    await until(lambda: server.http1() and server.connection._parser.body_bytes == 600)
    assert server.outcomes() == {}
    writer.write(chunk)
    status, headers, _ = await read_response(reader)
    assert (status, headers[b"connection"]) == (413, b"close")
    assert await reader.read() == b""


@pytest.mark.parametrize("name", ["films 2", "filme-übersicht", "50%41", "映画"])
async def test_model_name_is_percent_decoded_once(
    name: str, executor: ThreadPoolExecutor, rest: httpx.AsyncClient
) -> None:
    pipeline = make_pipeline(FakeEngine(model_info(name)), executor=executor)
    path = "/models/" + "".join(f"%{byte:02X}" for byte in name.encode())
    async with http_client(pipeline) as client:
        response = await client.post(f"{path}/embed", content=AS_JSON)
        assert response.json()["model"] == name
        assert (await client.get(path)).json()["model"] == name
    response = await rest.post(f"{path}/embed", content=AS_JSON)
    assert f"model is {name!r}" in error_of(response)["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_model_name_with_a_slash_is_not_found(rest: httpx.AsyncClient, method: str) -> None:
    suffix = "/embed" if method == "POST" else ""
    response = await rest.request(method, f"/models/a%2Fb{suffix}", content=AS_JSON)
    assert response.status_code == 404
    assert error_of(response)["code"] == "NOT_FOUND"
