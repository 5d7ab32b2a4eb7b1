"""Tests of curl: REST over HTTP/2 with prior knowledge and over HTTP/1.1, on both ports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from interop.lookups import (
    MODEL,
    WRONG,
    WRONG_FIELD,
    Lookup,
    assert_answers,
    large_answer,
    large_request,
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
        content, _, said = output.rpartition(b"\n")
        status, version, content_type = said.decode().split(" ", 2)
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
def test_embed(curl: Curl, path: str) -> None:
    asked = lookup(1)
    answer = curl.post(path, asked.json_body, JSON)
    assert (answer.status, answer.content_type) == (200, JSON)
    assert json.loads(answer.body) == asked.json_answer
    answer = curl.post(path, asked.body, PROTOBUF)
    assert (answer.status, answer.content_type) == (200, PROTOBUF)
    assert_answers([answer.body], [asked])


@pytest.mark.parametrize("make", [small, large_answer, large_request])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_unix_socket(uds: Path, version: str, make: Callable[[], Lookup]) -> None:
    asked = make()
    curl = Curl(version, "http://localhost")
    answer = curl.post("/embed", asked.body, PROTOBUF, "--unix-socket", str(uds))
    assert answer.status == 200
    assert_answers([answer.body], [asked])


@pytest.mark.parametrize("make", [large_answer, large_request])
def test_bodies_of_megabytes(curl: Curl, make: Callable[[], Lookup]) -> None:
    asked = make()
    answer = curl.post("/embed", asked.body, PROTOBUF)
    assert answer.status == 200
    assert_answers([answer.body], [asked])
    answer = curl.post("/embed", asked.json_body, JSON)
    assert answer.status == 200
    assert (json.loads(answer.body) == asked.json_answer) is True  # no diff of megabytes


def test_a_body_of_unknown_length(curl: Curl) -> None:
    """Sends chunks over HTTP/1.1, and no content-length over HTTP/2."""
    asked = large_request()
    options = ("--upload-file", "-", "--request", "POST", "--header", f"content-type: {PROTOBUF}")
    output = run_tool(
        "curl",
        *("--silent", "--show-error", VERSIONS[curl.version], *options, f"{curl.url}/embed"),
        stdin=asked.body,
    )
    assert_answers([output], [asked])


def test_a_body_over_the_limit_is_refused(each_port: str, tmp_path: Path) -> None:
    """Uses HTTP/1.1: over HTTP/2 curl 7.88 ignores a response that precedes the upload's end."""
    body = tmp_path / "body"
    with body.open("wb") as file:
        file.truncate(TOO_LARGE_BYTES)
    curl = Curl("1.1", f"http://{each_port}")
    answer = curl("/embed", "--data-binary", f"@{body}", "--header", f"content-type: {PROTOBUF}")
    assert answer.status == 413
    assert json.loads(answer.body)["error"]["code"] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/models", "/info", "/nothing"])
def test_management_is_the_same_everywhere(curl: Curl, server: Running, path: str) -> None:
    expected = httpx.get(server.http + path, verify=False, timeout=ANSWER_S_MAX)
    answer = curl(path)
    assert (answer.status, answer.body) == (expected.status_code, expected.content)
    assert answer.content_type == expected.headers["content-type"]


def test_metrics(curl: Curl) -> None:
    answer = curl("/metrics")
    assert answer.status == 200
    assert answer.content_type.startswith("text/plain")
    assert b"\n# TYPE embedserve_requests_total counter\n" in answer.body


def test_a_head_has_no_body(curl: Curl) -> None:
    answer = curl("/embed", "--head")
    assert answer.status == 405
    assert b"allow: post" in answer.body.lower()


def test_errors(curl: Curl) -> None:
    answer = curl.post("/embed", WRONG.json_body, JSON)
    assert answer.status == 400
    error = json.loads(answer.body)["error"]
    assert (error["code"], error["field"]) == ("INVALID_ARGUMENT", WRONG_FIELD)
    for status, path, options in [
        (405, "/embed", ("--request", "PUT")),
        (415, "/embed", ("--header", "content-encoding: gzip")),
        (400, "/embed", ("--header", "x-timeout-ms: soon")),
    ]:
        answer = curl(path, "--request", "POST", *options)
        assert (answer.status, answer.content_type) == (status, JSON)
    assert curl.post("/models/none/embed", lookup(1).json_body, JSON).status == 404


def test_a_hundred_requests_beside_each_other(curl: Curl, tmp_path: Path) -> None:
    """Uses a connection per request: curl 7.88 cannot share one that has just been opened."""
    lines = []
    asked = lookups(100)
    for number, one in enumerate(asked):
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
    outputs = [tmp_path / f"{number}.out" for number in range(len(asked))]
    assert_answers([output.read_bytes() for output in outputs], asked)
