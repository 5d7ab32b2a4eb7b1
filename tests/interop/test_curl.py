"""Tests of curl: REST over HTTP/2 with prior knowledge and over HTTP/1.1, on both ports."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from interop.lookups import (
    INVALID,
    INVALID_FIELD,
    MODEL,
    Lookup,
    assert_responses,
    large_request,
    large_response,
    lookup,
    lookups,
)
from interop.tools import ANSWER_S_MAX, run_tool
from running_servers import Running

VERSIONS = {"2": "--http2-prior-knowledge", "1.1": "--http1.1"}
JSON = "application/json"
PROTOBUF = "application/x-protobuf"
TOO_LARGE_BYTES = (64 << 20) + 1
"""Bytes of a body: one more than serve's default limit."""


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True)
class Curl:
    """curl with one HTTP version, for one port."""

    version: str
    url: str

    def __call__(self, path: str, *options: str, body: bytes | None = None) -> Answer:
        data = () if body is None else ("--data-binary", "@-")
        written = "\n%{response_code} %{http_version} %{content_type}"
        output = run_tool(
            "curl",
            *("--silent", "--show-error", VERSIONS[self.version], *data, *options),
            *("--write-out", written, self.url + path),
            stdin=body or b"",
        )
        content, _, status_line = output.rpartition(b"\n")
        status, version, content_type = status_line.decode().split(" ", 2)
        assert version == self.version
        return Answer(int(status), content_type, content)

    def post(self, path: str, body: bytes, content_type: str, *options: str) -> Answer:
        return self(path, "--header", f"content-type: {content_type}", *options, body=body)


def small() -> Lookup:
    return lookup(1)


@pytest.fixture(params=list(VERSIONS))
def curl(each_port: str, request: pytest.FixtureRequest) -> Curl:
    return Curl(request.param, f"http://{each_port}")


@pytest.mark.parametrize("path", ["/embed", f"/models/{MODEL}/embed"])
def test_embed_is_answered_in_json_and_protobuf(curl: Curl, path: str) -> None:
    requested = lookup(1)
    response = curl.post(path, requested.json_body, JSON)
    assert (response.status, response.content_type) == (200, JSON)
    assert json.loads(response.body) == requested.json_response
    response = curl.post(path, requested.body, PROTOBUF)
    assert (response.status, response.content_type) == (200, PROTOBUF)
    assert_responses([response.body], [requested])


@pytest.mark.parametrize("make", [small, large_response, large_request])
@pytest.mark.parametrize("version", VERSIONS)
def test_embed_over_a_unix_socket_is_answered(
    uds: Path, version: str, make: Callable[[], Lookup]
) -> None:
    requested = make()
    curl = Curl(version, "http://localhost")
    response = curl.post("/embed", requested.body, PROTOBUF, "--unix-socket", str(uds))
    assert response.status == 200
    assert_responses([response.body], [requested])


@pytest.mark.parametrize("make", [large_response, large_request])
def test_multi_megabyte_bodies_are_answered(curl: Curl, make: Callable[[], Lookup]) -> None:
    requested = make()
    response = curl.post("/embed", requested.body, PROTOBUF)
    assert response.status == 200
    assert_responses([response.body], [requested])
    response = curl.post("/embed", requested.json_body, JSON)
    assert response.status == 200
    assert (json.loads(response.body) == requested.json_response) is True  # no diff of megabytes


def test_body_of_unknown_length_is_answered(curl: Curl) -> None:
    """Sends chunks over HTTP/1.1, and no content-length over HTTP/2."""
    requested = large_request()
    options = ("--upload-file", "-", "--request", "POST", "--header", f"content-type: {PROTOBUF}")
    output = run_tool(
        "curl",
        *("--silent", "--show-error", VERSIONS[curl.version], *options, f"{curl.url}/embed"),
        stdin=requested.body,
    )
    assert_responses([output], [requested])


def test_body_over_the_limit_is_rejected(each_port: str, tmp_path: Path) -> None:
    """Uses HTTP/1.1: over HTTP/2 curl 7.88 ignores a response that precedes the upload's end."""
    body = tmp_path / "body"
    with body.open("wb") as file:
        file.truncate(TOO_LARGE_BYTES)
    curl = Curl("1.1", f"http://{each_port}")
    response = curl("/embed", "--data-binary", f"@{body}", "--header", f"content-type: {PROTOBUF}")
    assert response.status == 413
    assert json.loads(response.body)["error"]["code"] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/models", "/info", "/nothing"])
def test_management_responses_are_equal_on_every_port_and_version(
    curl: Curl, server: Running, path: str
) -> None:
    expected = httpx.get(server.http + path, verify=False, timeout=ANSWER_S_MAX)
    response = curl(path)
    assert (response.status, response.body) == (expected.status_code, expected.content)
    assert response.content_type == expected.headers["content-type"]


def test_metrics_are_prometheus_text(curl: Curl) -> None:
    response = curl("/metrics")
    assert response.status == 200
    assert response.content_type.startswith("text/plain")
    assert b"\n# TYPE embedserve_requests_total counter\n" in response.body


def test_head_request_to_embed_is_rejected_without_a_body(curl: Curl) -> None:
    response = curl("/embed", "--head")
    assert response.status == 405
    assert b"allow: post" in response.body.lower()


def test_invalid_requests_get_their_status_and_json_error(curl: Curl) -> None:
    response = curl.post("/embed", INVALID.json_body, JSON)
    assert response.status == 400
    error = json.loads(response.body)["error"]
    assert (error["code"], error["field"]) == ("INVALID_ARGUMENT", INVALID_FIELD)
    for status, path, options in [
        (405, "/embed", ("--request", "PUT")),
        (415, "/embed", ("--header", "content-encoding: gzip")),
        (400, "/embed", ("--header", "x-timeout-ms: soon")),
    ]:
        response = curl(path, "--request", "POST", *options)
        assert (response.status, response.content_type) == (status, JSON)
    assert curl.post("/models/none/embed", lookup(1).json_body, JSON).status == 404


def test_hundred_concurrent_requests_are_answered(curl: Curl, tmp_path: Path) -> None:
    """Uses a connection per request: curl 7.88 cannot share one that has just been opened."""
    lines = []
    requested = lookups(100)
    for number, one in enumerate(requested):
        (tmp_path / f"{number}.in").write_bytes(one.body)
        lines += [
            f'url = "{curl.url}/embed"',
            f'data-binary = "@{tmp_path}/{number}.in"',
            f'header = "content-type: {PROTOBUF}"',
            f'output = "{tmp_path}/{number}.out"',
            VERSIONS[curl.version].removeprefix("--"),
            "next",
        ]
    options = ("--silent", "--show-error", "--fail-early", "--config", "-")
    parallel = ("--parallel", "--parallel-immediate", "--parallel-max", "100")
    run_tool("curl", *options, *parallel, stdin="\n".join(lines[:-1]).encode())
    outputs = [tmp_path / f"{number}.out" for number in range(len(requested))]
    assert_responses([output.read_bytes() for output in outputs], requested)
