"""Tests of nghttp and h2load: HTTP/2 by nghttp2's client, REST and gRPC, on both ports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from interop.lookups import (
    SERVICE,
    Lookup,
    assert_answers,
    large_answer,
    large_request,
    lookup,
    unframed,
)
from interop.tools import run_tool

JSON = ("-H", "content-type: application/json")
PROTOBUF = ("-H", "content-type: application/x-protobuf")
GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")
EMBED = f"/{SERVICE}/Embed"
STREAM = f"/{SERVICE}/EmbedStream"
REQUESTS = 3000
TOO_LARGE_BYTES = (64 << 20) + 1
"""Bytes of a body: one more than serve's default limit."""
WAYS = {
    "plain": (),
    "padded": ("--padding=255",),
    "with a trailer": ("--trailer", "x-end: yes"),
    "without a content length": ("--no-content-length",),
    "into windows of 1 KB": ("--window-bits=10", "--connection-window-bits=16"),
    "with header tables that shrink": ("--header-table-size=0", "--header-table-size=1K"),
    "without a header table": ("--encoder-header-table-size=0", "--header-table-size=0"),
    "without priorities": ("--no-dep", "--no-rfc7540-pri"),
}


def nghttp(url: str, *options: object, body: bytes | None = None) -> bytes:
    """Returns the downloaded bytes, or the log with --verbose."""
    data = () if body is None else ("--data=-",)
    return run_tool("nghttp", "--timeout=60s", *data, *options, url, stdin=body or b"")


def test_frames_of_a_get(each_port: str) -> None:
    said = nghttp(f"http://{each_port}/health/live", "--verbose", "--null-out").decode()
    for line in ("recv SETTINGS frame", "SETTINGS_MAX_CONCURRENT_STREAMS", ":status: 200"):
        assert line in said
    assert "GOAWAY" not in said.split("; END_STREAM", 1)[1].split("send GOAWAY")[0]
    assert "RST_STREAM" not in said


@pytest.mark.parametrize("way", list(WAYS))
def test_requests_in_every_way_that_nghttp_knows(each_port: str, way: str) -> None:
    for asked in (lookup(1), large_request(), large_answer()):
        answer = nghttp(f"http://{each_port}/embed", *PROTOBUF, *WAYS[way], body=asked.body)
        assert_answers([answer], [asked])
    asked = lookup(2)
    answer = nghttp(f"http://{each_port}/embed", *JSON, *WAYS[way], body=asked.json_body)
    assert json.loads(answer) == asked.json_answer


@pytest.mark.parametrize("way", list(WAYS))
def test_grpc_in_every_way_that_nghttp_knows(each_port: str, way: str) -> None:
    asked = [lookup(3), large_answer(), lookup(4)]
    answer = nghttp(f"http://{each_port}{EMBED}", *GRPC, *WAYS[way], body=asked[1].framed)
    assert_answers(unframed(answer), asked[1:2])
    body = b"".join(one.framed for one in asked)
    answer = nghttp(f"http://{each_port}{STREAM}", *GRPC, *WAYS[way], body=body)
    assert_answers(unframed(answer), asked)


def test_a_body_that_awaits_100_is_answered(each_port: str) -> None:
    asked = lookup(5)
    answer = nghttp(f"http://{each_port}/embed", *PROTOBUF, "--expect-continue", body=asked.body)
    assert_answers([answer], [asked])


def test_the_same_request_many_times_over_one_connection(each_port: str, tmp_path: Path) -> None:
    asked = lookup(5)
    (tmp_path / "body").write_bytes(asked.framed)
    options = (*GRPC, f"--data={tmp_path}/body", "--multiply=90")
    answer = nghttp(f"http://{each_port}{EMBED}", *options)
    # Frames of the streams are interleaved.
    message = asked.answer.SerializeToString()
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    assert sorted(answer) == sorted(framed * 90)


def test_grpc_ends_in_trailers(each_port: str) -> None:
    said = nghttp(f"http://{each_port}{EMBED}", *GRPC, "-v", "-n", body=lookup(6).framed).decode()
    assert re.search(r"recv \(stream_id=\d+\) grpc-status: 0\n", said)
    assert re.search(r"recv \(stream_id=\d+\) content-type: application/grpc", said)
    assert "RST_STREAM" not in said


def test_a_header_block_past_the_limit_ends_the_connection(each_port: str) -> None:
    """Sends 18 KB of headers by nghttp's --continuation; the limit is 16 KiB."""
    said = nghttp(f"http://{each_port}/health/live", "--continuation", "-v", "-n").decode()
    assert "ENHANCE_YOUR_CALM" in said
    assert nghttp(f"http://{each_port}/health/live")


@pytest.mark.parametrize(
    ("size", "options", "status"),
    [
        (TOO_LARGE_BYTES, PROTOBUF, 413),
        (1_000_000, (*JSON, "-H", "content-encoding: gzip"), 415),
        (1_000_000, ("-H", ":method: PUT"), 405),
    ],
)
def test_an_upload_is_answered_before_its_end(
    each_port: str, tmp_path: Path, size: int, options: tuple[str, ...], status: int
) -> None:
    body = tmp_path / "body"
    with body.open("wb") as file:
        file.truncate(size)
    said = nghttp(f"http://{each_port}/embed", *options, f"--data={body}", "-v", "-n").decode()
    assert f":status: {status}\n" in said
    assert sent_bytes(said) < 600_000


def sent_bytes(said: str) -> int:
    """Returns the bytes of the DATA frames that nghttp logs as sent."""
    return sum(map(int, re.findall(r"send DATA frame <length=(\d+)", said)))


def h2load(url: str, body: bytes, folder: Path, *headers: str) -> tuple[dict[str, int], int]:
    """Runs a bounded load over 4 connections.

    Returns (requests by outcome, bytes of DATA of all responses).
    """
    (folder / "body").write_bytes(body)
    load = ("-n", REQUESTS, "-c", 4, "-m", 100, "-d", folder / "body")
    said = run_tool("h2load", *load, *headers, url).decode()
    counts = re.findall(r"(\d+) (total|succeeded|failed|errored|timeout|2xx|[345]xx)", said)
    data = re.search(r"headers.*, [^()]*\((\d+)\) data", said)
    assert data, said
    return {name: int(count) for count, name in counts}, int(data[1])


ALL_ANSWERED = {"total": REQUESTS, "succeeded": REQUESTS, "2xx": REQUESTS}
NONE_OTHER = dict.fromkeys(("failed", "errored", "timeout", "3xx", "4xx", "5xx"), 0)


def assert_all_answered(loaded: tuple[dict[str, int], int], answer_bytes: int) -> None:
    counts, data_bytes = loaded
    assert counts == ALL_ANSWERED | NONE_OTHER
    assert data_bytes == REQUESTS * answer_bytes


def rest_bytes(url: str, asked: Lookup) -> int:
    """Checks the JSON response, and returns its length."""
    answer = nghttp(url, *JSON, body=asked.json_body)
    assert json.loads(answer) == asked.json_answer
    return len(answer)


def test_h2load_of_rest(each_port: str, tmp_path: Path) -> None:
    asked, url = lookup(7), f"http://{each_port}/embed"
    loaded = h2load(url, asked.json_body, tmp_path, *JSON)
    assert_all_answered(loaded, rest_bytes(url, asked))
    loaded = h2load(url, asked.body, tmp_path, *PROTOBUF)
    assert_all_answered(loaded, asked.answer.ByteSize())


def test_h2load_of_grpc(each_port: str, tmp_path: Path) -> None:
    """Checks the bytes of DATA: an error would also have status 200, but no DATA."""
    asked = lookup(8)
    loaded = h2load(f"http://{each_port}{EMBED}", asked.framed, tmp_path, *GRPC)
    assert_all_answered(loaded, 5 + asked.answer.ByteSize())


def test_h2load_of_grpc_over_many_connections(target: str, tmp_path: Path) -> None:
    asked = lookup(9)
    (tmp_path / "body").write_bytes(asked.framed)
    load = ("-n", REQUESTS, "-c", 64, "-m", 1, "-d", tmp_path / "body", *GRPC)
    said = run_tool("h2load", *load, f"http://{target}{EMBED}").decode()
    assert f"{REQUESTS} succeeded, 0 failed, 0 errored, 0 timeout" in said
    assert f"({REQUESTS * (5 + asked.answer.ByteSize())}) data" in said
