"""Tests of requests that cost more than their bytes: the server counts their cost before it reads
them, and reads them off the event loop.

Each of these requests once stopped all clients for seconds, or took gigabytes.
"""

import http.client
import json
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hostile import frames as f
from hostile.conftest import MakePeer, Victim, victim_and_canary
from hostile.peer import WAIT_S_MAX
from hostile.target_server import ROWS
from server.arrow_streams import ARROW, columns_of, stream_of
from server.open_inference import InferRequest, jagged

from embedserve.config import DEFAULT_LIMITS
from embedserve_proto import embedding_pb2 as pb

MIB = 1 << 20
BODY_MIB = 30
"""MiB of a body, nearly the limit. The server rejects JSON of this size for its length alone."""


victim, canary = victim_and_canary("defaults")


JSON, PROTOBUF = "application/json", "application/x-protobuf"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8
ROUNDS_MAX = 20
"""Rounds of concurrent requests. A request that arrives in small chunks may be done before the
queue is full, so that a round may have no rejection."""
VALUES = 130_000
"""Ids of a request, nearly the limit of one request."""
USER = b"\x12\x04user"
"""The key "user" in protobuf."""


def post(
    victim: Victim, body: bytes, kind: str, url: str = "/embed", **headers: str
) -> tuple[int, dict[str, str]]:
    """Sends one request; returns (status, error).

    A server that rejects a body before its end reads the rest for a second or two. A slower client
    may be unable to send the rest, and still receives its response.
    """
    client = http.client.HTTPConnection("127.0.0.1", victim.http_port, timeout=WAIT_S_MAX)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):
            client.request("POST", url, body, {"Content-Type": kind, **headers})
        response = client.getresponse()
        content = response.read()
        return response.status, {} if response.status == 200 else json.loads(content)["error"]
    finally:
        client.close()


def features_json(*features: bytes) -> bytes:
    return b'{"features": {%b}}' % b",".join(features)


def length_delimited(tag: int, value: bytes) -> bytes:
    """Returns a field of a protobuf message."""
    return bytes([tag]) + pb.EmbedRequest(ids_bytes=value).SerializeToString()[1:]


def one_bag(ids: int) -> bytes:
    """Returns an Arrow stream with all ids in one bag; the last id is in no table."""
    values = np.zeros(ids, np.int64)
    values[-1] = -1
    return stream_of(pa.table({"user": pa.ListArray.from_arrays([0, ids], values)}))


def many_batches(count: int) -> bytes:
    """Returns an Arrow stream of ``count`` record batches with one example each."""
    table = columns_of({"user": [[1]]})
    one, start = stream_of(table), table.schema.serialize().size
    end = len(one) - 8
    return one[:start] + one[start:end] * count


def empty_bags(columns: int) -> bytes:
    """Returns an Arrow stream of 65,536 empty bags a column; the model has none of the columns."""
    bags = pa.ListArray.from_arrays(np.zeros(65_537, np.int32), np.zeros(0, np.int64))
    return stream_of(pa.table({f"f{at}": bags for at in range(columns)}))


def bags_of_no_bytes() -> bytes:
    rows = pa.array([[]] * 65_536, pa.list_(pa.int64(), 0))
    return stream_of(pa.table({f"f{at}": rows for at in range(4096)}))


Make = Callable[[], bytes]
"""Makes a body when it is sent, because all bodies together have half a gigabyte."""
TOO_COSTLY: dict[str, tuple[str, Make]] = {
    "JSON, 15 million ids": (JSON, lambda: features_json(b'"user":[%b1]' % (b"1," * 15_000_000))),
    "JSON, 4 million ids": (JSON, lambda: features_json(b'"user":[%b1]' % (b"1," * 4_000_000))),
    "JSON, 2 million empty bags": (
        JSON,
        lambda: features_json(b'"user":[%b[]]' % (b"[]," * 2_000_000)),
    ),
    "JSON, 8 million brackets": (JSON, lambda: b"[" * 8_000_000),
    "JSON, a string of 30 MB": (
        JSON,
        lambda: features_json(b'"user":["%b"]' % (b"a" * BODY_MIB * MIB)),
    ),
    "protobuf, 30 million packed ids": (
        PROTOBUF,
        lambda: USER + length_delimited(0x1A, b"\1" * BODY_MIB * MIB),
    ),
    "protobuf, 30 million packed lengths": (
        PROTOBUF,
        lambda: USER + length_delimited(0x22, b"\0" * BODY_MIB * MIB),
    ),
    "protobuf, 15 million ids one by one": (PROTOBUF, lambda: USER + b"\x18\1" * 15_000_000),
    "protobuf, 15 million strings": (PROTOBUF, lambda: USER + b"\x52\0" * 15_000_000),
    "protobuf, 15 million keys": (PROTOBUF, lambda: b"\x12\0" * 15_000_000),
    "protobuf, unknown fields": (PROTOBUF, lambda: b"\xfa\xff\xff\xff\x0f\x00" * 5_000_000),
    "protobuf, 3 million ids in bytes": (
        PROTOBUF,
        lambda: USER + length_delimited(0x32, bytes(24 * MIB)) + b"\x3a\x04\1\0\0\0",
    ),
    "protobuf, a key of 30 MB": (PROTOBUF, lambda: length_delimited(0x12, b"a" * BODY_MIB * MIB)),
    "Arrow, 3 million ids": (ARROW, lambda: one_bag(3 << 20)),
    "Arrow, a string of 20 MB": (ARROW, lambda: stream_of(pa.table({"user": ["a" * 20 * MIB]}))),
    "Arrow, 100,000 record batches": (ARROW, lambda: many_batches(100_000)),
    "Arrow, 268 million bags of no bytes": (ARROW, bags_of_no_bytes),
}


@pytest.mark.parametrize("name", TOO_COSTLY)
@pytest.mark.growth(4 * BODY_MIB << 10)
def test_requests_that_cost_too_much_are_rejected(victim: Victim, name: str) -> None:
    """Allows memory for the body, and as much again for its chunks, the sockets and its error."""
    kind, make = TOO_COSTLY[name]
    status, error = post(victim, make(), kind)
    assert (status, error["code"]) == (413, "RESOURCE_EXHAUSTED")
    assert "the limit is " in error["message"]


def many_strings() -> bytes:
    strings = [str(i) for i in range(VALUES)]
    message = pb.EmbedRequest(
        keys=["user"], string_keys=["user"], string_ids=strings, lengths=[VALUES]
    )
    return message.SerializeToString()


def one_id_a_bag(bags: int) -> bytes:
    ids, lengths = np.arange(bags, dtype="<i8") % ROWS, np.ones(bags, "<i4")
    return pb.EmbedRequest(
        keys=["user"], ids_bytes=ids.tobytes(), lengths_bytes=lengths.tobytes()
    ).SerializeToString()


ALLOWED: dict[str, tuple[str, Make, int]] = {
    "JSON, as many ids as may be": (
        JSON,
        lambda: features_json(b'"user":[%b1]' % (b"1," * VALUES)),
        200,
    ),
    "JSON, as many bags as may be": (
        JSON,
        lambda: features_json(b'"user":[%b[]]' % (b"[]," * (VALUES // 2))),
        200,
    ),
    "JSON, wrong at its end": (
        JSON,
        lambda: features_json(b'"user":[%b["a"]]' % (b"[1]," * (VALUES // 2 - 2))),
        400,
    ),
    "JSON, strings": (JSON, lambda: features_json(b'"user":[%b"a"]' % (b'"a",' * VALUES)), 400),
    "JSON, escapes": (JSON, lambda: features_json(b'"user":["%b"]' % (b"\\u00e9" * 690_000)), 400),
    "JSON, spaces": (JSON, lambda: b" " * (4 * MIB - 10) + b"x", 400),
    "protobuf, a million packed ids": (
        PROTOBUF,
        lambda: (
            USER + length_delimited(0x1A, b"\1" * (MIB - 2) + b"\xff\x7f") + b"\x22\x03\xff\xff\x3f"
        ),
        400,
    ),
    "protobuf, a million large packed ids": (
        PROTOBUF,
        lambda: (
            USER + length_delimited(0x1A, (b"\xff" * 8 + b"\1") * MIB) + b"\x22\x03\x80\x80\x40"
        ),
        400,
    ),
    "protobuf, strings": (PROTOBUF, many_strings, 400),
    "JSON, the largest answer as float16": (
        JSON,
        lambda: (
            b'{"features": {"user": [%b[1]]}, "output_dtype": "float16"}'
            % (b"[]," * (VALUES // 2 - 1))
        ),
        200,
    ),
    "protobuf, the largest answer": (PROTOBUF, lambda: one_id_a_bag(65_536), 200),
    "Arrow, a million ids": (ARROW, lambda: one_bag(MIB), 400),
    "Arrow, 6 million bags": (ARROW, lambda: empty_bags(100), 400),
    "Arrow, strings": (
        ARROW,
        lambda: stream_of(pa.table({"user": [[str(one) for one in range(VALUES)] + ["a"]]})),
        400,
    ),
    "Arrow, as many record batches as may be": (ARROW, lambda: many_batches(252), 200),
    "Arrow, the largest answer, by key": (
        ARROW,
        lambda: stream_of(
            pa.table({"user": np.arange(65_536) % ROWS}), options={"columns": "keys"}
        ),
        200,
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.growth(96 << 10)
def test_requests_at_the_cost_limit_do_not_block_other_clients(victim: Victim, name: str) -> None:
    kind, make, expected = ALLOWED[name]
    body = make()
    for _ in range(3):
        status, error = post(victim, body, kind)
        assert (status, error.get("code", "")) == (
            expected,
            "" if expected == 200 else "INVALID_ARGUMENT",
        )


@pytest.mark.growth(160 << 10)
def test_requests_with_unknown_keys_are_not_cached(victim: Victim) -> None:
    """Checks that the memory for cached requests is bounded in bytes: ten requests of twice the
    size once took 400 MB.
    """
    for i in range(20):
        keys = [f"{i}-{number}-{'x' * 900}" for number in range(4096)]
        body = pb.EmbedRequest(keys=keys, ids=[1], lengths=[1] * len(keys)).SerializeToString()
        assert len(body) > 3 * MIB
        assert post(victim, body, PROTOBUF)[0] == 400


@pytest.mark.growth(96 << 10)
def test_cached_errors_do_not_hold_long_names(victim: Victim) -> None:
    """Checks the cache of 16 responses per format: 190 MB, if errors quoted whole names."""
    for i in range(32):
        name = f"{i}{'x' * 3 * MIB}"
        message = pb.EmbedRequest(keys=[name], ids=[1], lengths=[1]).SerializeToString()
        assert post(victim, message, PROTOBUF)[0] == 400
        assert post(victim, features_json(b'"%b":[1]' % name.encode()), JSON)[0] == 400


@pytest.mark.growth(96 << 10)
def test_template_cache_is_bounded_when_every_request_differs(
    victim: Victim, grpc_peer: MakePeer
) -> None:
    """Sends Open Inference Protocol requests with new names and examples each time: the memory of
    cached templates is bounded. The canary client gets its responses meanwhile, as in every test
    here.
    """
    peer = grpc_peer()
    path = b"/inference.GRPCInferenceService/ModelInfer"
    for at in range(300):
        names = [f"{at}-{number}-{'x' * 30}" for number in range(40)]
        inference_request = InferRequest(jagged({name: [[1]] * (at % 50 + 1) for name in names}))
        body, headers = inference_request.binary_body()
        url = "/v2/models/m/infer"
        assert post(victim, body, "application/octet-stream", url=url, **headers)[0] == 400
        stream = 2 * at + 1
        peer.send(
            f.call(stream, inference_request.message("m", is_raw=True).SerializeToString(), path)
        )
        assert peer.response(stream).grpc_status == INVALID_ARGUMENT


def test_decoding_time_counts_towards_the_deadline(victim: Victim) -> None:
    kind, make, _ = ALLOWED["JSON, as many ids as may be"]
    headers = {"X-Timeout-Ms": "1"}
    status, error = post(victim, make(), kind, **headers)
    assert (status, error["code"]) == (504, "DEADLINE_EXCEEDED")


@pytest.mark.growth(96 << 10)
def test_one_connection_does_not_fill_the_queue(grpc_peer: MakePeer) -> None:
    """Sends 128 small requests that together have four times the examples that a queue takes. As in
    every test here, the canary client's requests must not be rejected.
    """
    examples = DEFAULT_LIMITS.queue_examples_max // 32
    request = pb.EmbedRequest(keys=["user"], ids=[1] * examples, lengths=[1] * examples)
    message = request.SerializeToString()
    full = 0
    for _ in range(ROUNDS_MAX):
        peer = grpc_peer()
        peer.send(b"".join(f.call(stream, message) for stream in range(1, 257, 2)))
        codes = {peer.response(stream).grpc_status for stream in range(1, 257, 2)}
        assert codes in ({0}, {0, RESOURCE_EXHAUSTED})
        peer.close()
        full += RESOURCE_EXHAUSTED in codes
        if full == 3:
            return
    pytest.fail(f"{full} of {ROUNDS_MAX} connections requested more than their share")
