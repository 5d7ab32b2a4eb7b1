"""Tests of nghttp and h2load: HTTP/2 by nghttp2's client, REST and gRPC, on both ports."""

import json
import re
from pathlib import Path

import pytest
from grpc_messages import unframed
from interop.lookups import SERVICE, Lookup, assert_responses, large_request, large_response, lookup
from interop.tools import run_tool

JSON = ("-H", "content-type: application/json")
PROTOBUF = ("-H", "content-type: application/x-protobuf")
GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")
EMBED = f"/{SERVICE}/Embed"
STREAM = f"/{SERVICE}/EmbedStream"
REQUESTS = 3000
TOO_LARGE_BYTES = (64 << 20) + 1
"""Bytes of a body: one more than serve's default limit."""
OPTION_SETS = {
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


def test_get_receives_settings_and_no_errors(each_port: str) -> None:
    output = nghttp(f"http://{each_port}/health/live", "--verbose", "--null-out").decode()
    for line in ("recv SETTINGS frame", "SETTINGS_MAX_CONCURRENT_STREAMS", ":status: 200"):
        assert line in output
    assert "GOAWAY" not in output.split("; END_STREAM", 1)[1].split("send GOAWAY")[0]
    assert "RST_STREAM" not in output


@pytest.mark.parametrize("option_set", list(OPTION_SETS))
def test_rest_is_answered_with_every_nghttp_option_set(each_port: str, option_set: str) -> None:
    for requested in (lookup(1), large_request(), large_response()):
        response = nghttp(
            f"http://{each_port}/embed", *PROTOBUF, *OPTION_SETS[option_set], body=requested.body
        )
        assert_responses([response], [requested])
    requested = lookup(2)
    response = nghttp(
        f"http://{each_port}/embed", *JSON, *OPTION_SETS[option_set], body=requested.json_body
    )
    assert json.loads(response) == requested.json_response


@pytest.mark.parametrize("option_set", list(OPTION_SETS))
def test_grpc_is_answered_with_every_nghttp_option_set(each_port: str, option_set: str) -> None:
    requested = [lookup(3), large_response(), lookup(4)]
    response = nghttp(
        f"http://{each_port}{EMBED}", *GRPC, *OPTION_SETS[option_set], body=requested[1].framed
    )
    assert_responses(unframed(response), requested[1:2])
    body = b"".join(one.framed for one in requested)
    response = nghttp(f"http://{each_port}{STREAM}", *GRPC, *OPTION_SETS[option_set], body=body)
    assert_responses(unframed(response), requested)


def test_body_that_awaits_100_continue_is_answered(each_port: str) -> None:
    requested = lookup(5)
    response = nghttp(
        f"http://{each_port}/embed", *PROTOBUF, "--expect-continue", body=requested.body
    )
    assert_responses([response], [requested])


def test_repeated_requests_over_one_connection_are_answered(each_port: str, tmp_path: Path) -> None:
    requested = lookup(5)
    (tmp_path / "body").write_bytes(requested.framed)
    options = (*GRPC, f"--data={tmp_path}/body", "--multiply=90")
    response = nghttp(f"http://{each_port}{EMBED}", *options)
    # Frames of the streams are interleaved.
    message = requested.response.SerializeToString()
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    assert sorted(response) == sorted(framed * 90)


def test_grpc_response_ends_with_trailers(each_port: str) -> None:
    output = nghttp(f"http://{each_port}{EMBED}", *GRPC, "-v", "-n", body=lookup(6).framed).decode()
    assert re.search(r"recv \(stream_id=\d+\) grpc-status: 0\n", output)
    assert re.search(r"recv \(stream_id=\d+\) content-type: application/grpc", output)
    assert "RST_STREAM" not in output


def test_header_block_over_the_limit_ends_the_connection(each_port: str) -> None:
    """Sends 18 KB of headers by nghttp's --continuation; the limit is 16 KiB."""
    output = nghttp(f"http://{each_port}/health/live", "--continuation", "-v", "-n").decode()
    assert "ENHANCE_YOUR_CALM" in output
    assert nghttp(f"http://{each_port}/health/live")


@pytest.mark.parametrize(
    ("size", "options", "status"),
    [
        (TOO_LARGE_BYTES, PROTOBUF, 413),
        (1_000_000, (*JSON, "-H", "content-encoding: gzip"), 415),
        (1_000_000, ("-H", ":method: PUT"), 405),
    ],
)
def test_rejected_upload_is_answered_before_its_end(
    each_port: str, tmp_path: Path, size: int, options: tuple[str, ...], status: int
) -> None:
    body = tmp_path / "body"
    with body.open("wb") as file:
        file.truncate(size)
    output = nghttp(f"http://{each_port}/embed", *options, f"--data={body}", "-v", "-n").decode()
    assert f":status: {status}\n" in output
    assert sent_bytes(output) < 600_000


def sent_bytes(output: str) -> int:
    """Returns the bytes of the DATA frames that nghttp logs as sent."""
    return sum(map(int, re.findall(r"send DATA frame <length=(\d+)", output)))


def h2load(url: str, body: bytes, folder: Path, *headers: str) -> tuple[dict[str, int], int]:
    """Runs a bounded load over 4 connections.

    Returns (requests by outcome, bytes of DATA of all responses).
    """
    (folder / "body").write_bytes(body)
    load = ("-n", REQUESTS, "-c", 4, "-m", 100, "-d", folder / "body")
    output = run_tool("h2load", *load, *headers, url).decode()
    counts = re.findall(r"(\d+) (total|succeeded|failed|errored|timeout|2xx|[345]xx)", output)
    data = re.search(r"headers.*, [^()]*\((\d+)\) data", output)
    assert data, output
    return {name: int(count) for count, name in counts}, int(data[1])


ALL_ANSWERED = {"total": REQUESTS, "succeeded": REQUESTS, "2xx": REQUESTS}
NO_OTHER_OUTCOMES = dict.fromkeys(("failed", "errored", "timeout", "3xx", "4xx", "5xx"), 0)


def assert_all_answered(loaded: tuple[dict[str, int], int], response_bytes: int) -> None:
    counts, data_bytes = loaded
    assert counts == ALL_ANSWERED | NO_OTHER_OUTCOMES
    assert data_bytes == REQUESTS * response_bytes


def rest_bytes(url: str, requested: Lookup) -> int:
    """Checks the JSON response, and returns its length."""
    response = nghttp(url, *JSON, body=requested.json_body)
    assert json.loads(response) == requested.json_response
    return len(response)


def test_h2load_of_rest_loses_no_requests(each_port: str, tmp_path: Path) -> None:
    requested, url = lookup(7), f"http://{each_port}/embed"
    loaded = h2load(url, requested.json_body, tmp_path, *JSON)
    assert_all_answered(loaded, rest_bytes(url, requested))
    loaded = h2load(url, requested.body, tmp_path, *PROTOBUF)
    assert_all_answered(loaded, requested.response.ByteSize())


def test_h2load_of_grpc_loses_no_requests(each_port: str, tmp_path: Path) -> None:
    """Checks the bytes of DATA: an error would also have status 200, but no DATA."""
    requested = lookup(8)
    loaded = h2load(f"http://{each_port}{EMBED}", requested.framed, tmp_path, *GRPC)
    assert_all_answered(loaded, 5 + requested.response.ByteSize())


def test_h2load_of_grpc_over_many_connections_loses_no_requests(
    target: str, tmp_path: Path
) -> None:
    requested = lookup(9)
    (tmp_path / "body").write_bytes(requested.framed)
    load = ("-n", REQUESTS, "-c", 64, "-m", 1, "-d", tmp_path / "body", *GRPC)
    output = run_tool("h2load", *load, f"http://{target}{EMBED}").decode()
    assert f"{REQUESTS} succeeded, 0 failed, 0 errored, 0 timeout" in output
    assert f"({REQUESTS * (5 + requested.response.ByteSize())}) data" in output
