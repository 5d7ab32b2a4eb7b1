"""Tests of decoding in a thread: large requests get responses within bounds, while the event loop
serves other requests."""

import gc
import json
import threading
from collections.abc import Callable
from time import perf_counter

import numpy as np
import pytest
from server.codecs import CODECS, JSON, PROTOBUF, decoding_in_thread
from server.fake_engine import FakeEngine
from server.gate import Gate
from server.open_inference import LENGTH_HEADER, InferRequest, Input
from server.open_inference import jagged as jagged_inputs
from server.predictions import prediction_request
from server.recording_call import (
    BODY,
    RecordingCall,
    SourceWriter,
    expect_internal,
    fail,
    make_options,
    outcomes,
    submit_request,
)
from server.waiting import until

from embedserve.access.caller_quota import CallerQuota
from embedserve.access.grants import Grant
from embedserve.batching.pending_request import PendingRequest
from embedserve.codec import json_codec, protobuf_codec
from embedserve.codec.codec import Codec
from embedserve.codec.open_inference.message_template import INLINE_JAGGED_BYTES_MAX
from embedserve.codec.open_inference.tensors import INLINE_TENSOR_BYTES_MAX
from embedserve.config import Limits
from embedserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
)
from embedserve.lookup_types import LookupRequest, WouldBlockError
from embedserve.pipeline import RequestPipeline, codec_executor
from embedserve_proto import embedding_pb2 as pb

LARGE = json.dumps({"features": {"user": [1, 2] * json_codec.INLINE_JSON_BYTES_MAX}}).encode()
WRONG = json.dumps(
    {"features": {"user": [[1]] * json_codec.INLINE_JSON_BYTES_MAX + [["a"]]}}
).encode()
LIMITS = Limits(request_values_max=1 << 20)


def gated_codec(gate: Gate) -> Codec:
    """Returns the JSON codec, whose decoding in the thread waits at ``gate``."""
    return decoding_in_thread(JSON, gate.before(JSON.decode))


async def test_other_requests_are_served_while_a_large_request_is_decoded(
    pipeline: RequestPipeline, engine: FakeEngine, gate: Gate
) -> None:
    large = submit_request(pipeline, LARGE, gated_codec(gate))
    small = submit_request(pipeline)
    await until(lambda: small.responses)
    assert large.responses == []
    gate.opened.set()
    await until(lambda: large.responses)
    (body,) = large.responses
    assert isinstance(body, bytes)
    values = np.frombuffer(pb.EmbedResponse.FromString(body).values, "<f4")
    expected = engine.expected({"user": [[1, 2] * json_codec.INLINE_JSON_BYTES_MAX]})[0]
    assert np.array_equal(values, expected)
    assert gate.threads[0] is not threading.main_thread()
    assert outcomes(pipeline) == {"OK": 2}


@pytest.mark.parametrize("body", [BODY, LARGE], ids=["inline", "in a thread"])
async def test_request_for_a_model_of_other_callers_is_rejected(
    pipeline: RequestPipeline, body: bytes
) -> None:
    call = RecordingCall(pipeline, make_options(pipeline))
    call.quota = CallerQuota(Grant("x", models=frozenset({"films"})))
    pipeline.submit(call, body)
    await until(lambda: call.responses)
    assert call.error.code == "PERMISSION_DENIED"


async def test_invalid_large_request_names_the_wrong_field(pipeline: RequestPipeline) -> None:
    call = submit_request(pipeline, WRONG)
    assert call.responses == []
    await until(lambda: call.responses)
    assert isinstance(call.error, InvalidRequestError)
    assert call.error.field == f"features.user[{json_codec.INLINE_JSON_BYTES_MAX}][0]"
    assert outcomes(pipeline) == {"INVALID_ARGUMENT": 1}


async def test_unexpected_error_in_the_decoding_thread_returns_a_general_message(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    call = submit_request(pipeline, LARGE, decoding_in_thread(JSON, fail))
    await until(lambda: call.responses)
    expect_internal(call, caplog)
    assert outcomes(pipeline) == {"INTERNAL": 1}


@pytest.mark.parametrize("body", [LARGE, WRONG])
async def test_request_cancelled_during_decoding_is_not_looked_up(
    pipeline: RequestPipeline,
    engine: FakeEngine,
    gate: Gate,
    body: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cancelled = submit_request(pipeline, body, gated_codec(gate))
    await until(lambda: gate.threads)
    cancelled.cancel()
    after = submit_request(pipeline, LARGE, gated_codec(gate))
    gate.opened.set()
    await until(lambda: after.responses)
    assert cancelled.responses == []
    assert len(engine.lookups) == 1
    assert outcomes(pipeline) == {"CANCELLED": 1, "OK": 1}
    gc.collect()  # asyncio logs errors of futures that nobody has read
    assert not caplog.messages


async def test_deadline_that_passes_during_decoding_rejects_the_request(
    pipeline: RequestPipeline, engine: FakeEngine, gate: Gate
) -> None:
    late = submit_request(pipeline, LARGE, gated_codec(gate), timeout_s=60.0)
    await until(lambda: gate.threads)
    late.deadline_s = perf_counter()
    gate.opened.set()
    await until(lambda: late.responses)
    assert isinstance(late.error, DeadlineExceededError)
    assert engine.lookups == []


async def test_requests_waiting_to_be_decoded_are_limited_by_bytes(
    pipeline: RequestPipeline, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_executor, "WAITING_BYTES_MAX", 2 * len(LARGE))
    waiting = [submit_request(pipeline, LARGE, gated_codec(gate)) for _ in range(2)]
    over = submit_request(pipeline, LARGE, gated_codec(gate))
    assert isinstance(over.error, OverloadedError)
    assert f"{2 * len(LARGE)} of other large requests and answers wait" in over.error.message
    small = submit_request(pipeline)
    await until(lambda: small.responses)
    gate.opened.set()
    await until(lambda: all(call.responses for call in waiting))
    again = submit_request(pipeline, LARGE, gated_codec(gate))
    await until(lambda: again.responses)
    assert outcomes(pipeline) == {"RESOURCE_EXHAUSTED": 1, "OK": 4}


async def test_decoding_thread_is_shared_fairly_between_callers(
    pipeline: RequestPipeline, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_executor, "WAITING_BYTES_MAX", 6 * len(LARGE))

    def submit_as(source: str) -> RecordingCall:
        return submit_request(pipeline, LARGE, gated_codec(gate), writer=SourceWriter(source))

    many = [submit_as("A") for _ in range(3)]
    await until(lambda: gate.threads)
    over = submit_as("A")
    assert isinstance(over.error, OverloadedError)
    assert f"{3 * len(LARGE)} of other large requests and answers of this" in over.error.message
    other = submit_as("B")
    ended: list[RecordingCall] = []
    enqueue = pipeline.models.enqueue

    def record_enqueued(request: LookupRequest, pending: PendingRequest) -> None:
        assert isinstance(pending, RecordingCall)
        ended.append(pending)
        enqueue(request, pending)

    monkeypatch.setattr(pipeline.models, "enqueue", record_enqueued)
    gate.opened.set()
    await until(lambda: all(call.responses for call in (*many, other)))
    assert [call is other for call in ended] == [False, False, True, False]
    again = submit_as("A")
    await until(lambda: again.responses)
    assert outcomes(pipeline) == {"RESOURCE_EXHAUSTED": 1, "OK": 5}


async def test_request_that_expires_while_queued_is_not_decoded(
    pipeline: RequestPipeline, gate: Gate
) -> None:
    first = submit_request(pipeline, LARGE, gated_codec(gate))
    await until(lambda: gate.threads)
    late = submit_request(pipeline, LARGE, gated_codec(gate), timeout_s=60.0)
    late.deadline_s = perf_counter()
    gate.opened.set()
    await until(lambda: first.responses and late.responses)
    assert isinstance(late.error, DeadlineExceededError)
    assert "while the body waited" in late.error.message
    assert len(gate.threads) == 1


async def test_decoding_thread_is_restarted_after_failed_starts(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that each failed start fails one request, and that queued requests still get
    responses."""
    start, left = threading.Thread.start, ["first", "second"]

    def start_or_fail(thread: threading.Thread) -> None:
        if left and thread.name.startswith("codec"):
            raise RuntimeError(f"can't start new thread: {left.pop(0)}")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    calls = [submit_request(pipeline, LARGE) for _ in range(3)]
    await until(lambda: all(call.responses for call in calls))
    assert [call.error.code for call in calls[:2]] == ["INTERNAL"] * 2
    assert "can't start new thread: second" in caplog.text
    again = submit_request(pipeline, LARGE)
    await until(lambda: again.responses)
    assert outcomes(pipeline) == {"INTERNAL": 2, "OK": 2}


async def test_single_request_is_decoded_whatever_its_size(
    pipeline: RequestPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_executor, "WAITING_BYTES_MAX", 1)
    call = submit_request(pipeline, LARGE)
    await until(lambda: call.responses)
    assert outcomes(pipeline) == {"OK": 1}


def message(**more: object) -> bytes:
    return pb.EmbedRequest(keys=["user"], **more).SerializeToString()  # type: ignore[arg-type]


MANY = protobuf_codec.INLINE_PROTOBUF_BYTES_MAX + 1


@pytest.mark.parametrize(
    ("codec", "body", "is_inline"),
    [
        (JSON, BODY, True),
        (JSON, LARGE, False),
        (PROTOBUF, message(ids_bytes=bytes(8 * MANY), lengths_bytes=b"\1\0\0\0"), True),
        (PROTOBUF, message(ids=[1] * MANY, lengths=[MANY]), False),
        (PROTOBUF, message(ids=[1] * 1000, lengths=[1000]), True),
        (PROTOBUF, message(string_keys=["user"], string_ids=["a"] * 5000, lengths=[5000]), False),
        (PROTOBUF, message(string_keys=["user"], string_ids=["a" * MANY], lengths=[1]), False),
    ],
)
def test_small_requests_are_decoded_inline(codec: Codec, body: bytes, is_inline: bool) -> None:
    assert_decoded_inline(codec, body, is_inline)


def assert_decoded_inline(codec: Codec, body: bytes, is_inline: bool) -> None:
    if is_inline:
        decoded = codec.decode(body, "", LIMITS, is_inline=True)
        assert np.array_equal(decoded.ids, codec.decode(body, "", LIMITS).ids)
    else:
        with pytest.raises(WouldBlockError):
            codec.decode(body, "", LIMITS, is_inline=True)


def prediction(ids: int, dtype: str = "<i8") -> bytes:
    request = prediction_request(["user"], {"user": [list(range(ids))]}, dtype=dtype)
    return request.SerializeToString()


Inputs = list[Input]


def padded(ids: int) -> Inputs:
    return [Input("user", "INT64", np.arange(ids).reshape(4, -1).tolist())]


def jagged(ids: int) -> Inputs:
    return jagged_inputs({"user": [list(range(ids))]})


def weighted(ids: int) -> Inputs:
    return [*jagged(ids), Input("user.weights", "FP32", [1.0] * ids)]


def infer_message(inputs: Inputs) -> tuple[Codec, bytes]:
    message = InferRequest(inputs).message("shop", is_raw=True)
    return CODECS.infer_message, message.SerializeToString()


def infer_body(inputs: Inputs) -> tuple[Codec, bytes]:
    body, headers = InferRequest(inputs).binary_body()
    return CODECS.infer_binary(int(headers[LENGTH_HEADER])), body


@pytest.mark.parametrize("min_seq", [None, b"0"])
def test_large_predictions_are_decoded_in_the_thread(min_seq: bytes | None) -> None:
    codec = CODECS.predict_from(min_seq)
    for ids, is_inline in ((1000, True), (INLINE_TENSOR_BYTES_MAX // 4, False)):
        assert_decoded_inline(codec, prediction(ids), is_inline)
        assert np.array_equal(codec.decode(prediction(ids), "", LIMITS).ids, np.arange(ids))


@pytest.mark.parametrize("encode_tensors", [infer_message, infer_body])
@pytest.mark.parametrize(
    ("inputs", "is_inline"),
    [
        (padded(1000), True),
        (weighted(1000), True),
        (jagged(INLINE_TENSOR_BYTES_MAX // 4), True),
        (padded(INLINE_TENSOR_BYTES_MAX // 4), False),
        (weighted(INLINE_TENSOR_BYTES_MAX // 6), False),
        (jagged(INLINE_JAGGED_BYTES_MAX // 8), False),
    ],
)
def test_large_tensors_are_decoded_in_the_thread(
    encode_tensors: Callable[[Inputs], tuple[Codec, bytes]], inputs: Inputs, is_inline: bool
) -> None:
    codec, body = encode_tensors(inputs)
    assert_decoded_inline(codec, body, is_inline)
    assert np.array_equal(codec.decode(body, "", LIMITS).ids, inputs[0].flat)


@pytest.mark.parametrize("count_max", [100, 1999])
def test_requests_over_the_value_limit_are_not_decoded_inline(count_max: int) -> None:
    body = message(string_keys=["user"], string_ids=["a"] * 2000, lengths=[2000])
    with pytest.raises(WouldBlockError):
        PROTOBUF.decode(body, "", Limits(request_values_max=count_max), is_inline=True)
    assert PROTOBUF.decode(body, "", LIMITS, is_inline=True).batch_size == 1


SMALL_LIMITS = Limits(
    request_features_max=3,
    request_ids_max=1000,
    request_examples_max=100,
    request_values_max=2000,
    request_text_bytes_max=100_000,
)


@pytest.mark.parametrize(
    ("codec", "body", "setting"),
    [
        (JSON, b'{"features": {"user": [%b1]}}' % (b"1," * 2000), "--request-values-max"),
        (JSON, b'{"features": {"user": [%b[]]}}' % (b"[]," * 2000), "--request-values-max"),
        (JSON, b"[" * 3000, "--request-values-max"),
        (JSON, b'{"features": {"a":[1],"b":[],"c":[],"d":[]}}', "--request-features-max"),
        (PROTOBUF, message(ids=[1] * 1001, lengths=[1001]), "--request-ids-max"),
        (PROTOBUF, message(ids=[2**60] * 2000, lengths=[1001]), "--request-ids-max"),
        (PROTOBUF, message(ids_bytes=bytes(8008), lengths=[1001]), "--request-ids-max"),
        (PROTOBUF, message(weights=[1.0] * 1001, lengths=[1]), "--request-ids-max"),
        (PROTOBUF, message(lengths=[0] * 101), "--request-examples-max"),
        (CODECS.predict, prediction(2000, "<i4"), "--request-ids-max"),
        (CODECS.predict, prediction(1001), "--request-ids-max"),
        (PROTOBUF, message(string_ids=["a"] * 2000), "--request-values-max"),
        (PROTOBUF, b"\x12\x04user" + b"\x18\x01" * 2000, "--request-values-max"),
        (PROTOBUF, message(model="a" * 100_000), "--request-text-bytes-max"),
        (
            PROTOBUF,
            pb.EmbedRequest(keys=list("abcd")).SerializeToString(),
            "--request-features-max",
        ),
    ],
)
def test_oversized_request_is_rejected_with_limit_and_setting(
    codec: Codec, body: bytes, setting: str
) -> None:
    with pytest.raises(RequestTooLargeError) as caught:
        codec.decode(body, "", SMALL_LIMITS)
    name = setting.removeprefix("--").replace("-", "_")
    assert f"the limit is {getattr(SMALL_LIMITS, name)} ({setting})" in caught.value.message
    assert caught.value.field
