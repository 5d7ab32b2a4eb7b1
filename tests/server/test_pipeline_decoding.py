"""Tests of decoding in a thread: large requests get responses within bounds, while the event loop
serves other requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
from server.codecs import CODECS, JSON, PROTOBUF
from server.fake_engine import FakeEngine
from server.gate import Gate
from server.live import make_pipeline
from server.recording_call import (
    BODY,
    RecordingCall,
    RecordingWriter,
    ask,
    asked,
    expect_internal,
    fail,
    outcomes,
)
from server.waiting import until

from embedserve.batching.pending_request import PendingRequest
from embedserve.codec import json_codec, protobuf_codec
from embedserve.codec.codec import Codec
from embedserve.codec.open_inference.tensors import INLINE_BYTES_MAX
from embedserve.config import Limits
from embedserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
)
from embedserve.lookup_types import LookupRequest
from embedserve.pipeline import RequestPipeline, codec_executor
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import open_inference_pb2, predictor_pb2

LARGE = json.dumps({"features": {"user": [1, 2] * json_codec.INLINE_BYTES_MAX}}).encode()
WRONG = json.dumps({"features": {"user": [[1]] * json_codec.INLINE_BYTES_MAX + [["a"]]}}).encode()
LIMITS = Limits(request_values_max=1 << 20)


def held(gate: Gate) -> Codec:
    """Returns the JSON codec, whose decoding in the thread waits at ``gate``."""
    return replace(JSON, decode=gate.before(JSON.decode))


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor) -> RequestPipeline:
    return make_pipeline(engine, executor=executor, limits=LIMITS)


def ask_large(pipeline: RequestPipeline, codec: Codec, body: bytes = LARGE) -> RecordingCall:
    call = RecordingCall(pipeline, asked(pipeline, codec))
    pipeline.submit(call, body)
    return call


async def test_others_are_answered_while_a_large_request_is_decoded(
    pipeline: RequestPipeline, engine: FakeEngine, gate: Gate
) -> None:
    large = ask_large(pipeline, held(gate))
    small = ask(pipeline)
    await until(lambda: small.told)
    assert large.told == []
    gate.opened.set()
    await until(lambda: large.told)
    (body,) = large.told
    assert isinstance(body, bytes)
    values = np.frombuffer(pb.EmbedResponse.FromString(body).values, "<f4")
    expected = engine.expected({"user": [[1, 2] * json_codec.INLINE_BYTES_MAX]})[0]
    assert np.array_equal(values, expected)
    assert gate.threads[0] is not threading.main_thread()
    assert outcomes(pipeline) == {"OK": 2}


async def test_what_is_wrong_with_a_large_request_is_told(pipeline: RequestPipeline) -> None:
    call = ask_large(pipeline, JSON, WRONG)
    assert call.told == []
    await until(lambda: call.told)
    assert isinstance(call.error, InvalidRequestError)
    assert call.error.field == f"features.user[{json_codec.INLINE_BYTES_MAX}][0]"
    assert outcomes(pipeline) == {"INVALID_ARGUMENT": 1}


async def test_an_unforeseen_error_in_the_thread_is_answered_in_general(
    pipeline: RequestPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    call = ask_large(pipeline, replace(JSON, decode=fail))
    await until(lambda: call.told)
    expect_internal(call, caplog)
    assert outcomes(pipeline) == {"INTERNAL": 1}


@pytest.mark.parametrize("body", [LARGE, WRONG])
async def test_a_client_that_goes_away_meanwhile_costs_no_lookup(
    pipeline: RequestPipeline, engine: FakeEngine, gate: Gate, body: bytes
) -> None:
    gone = ask_large(pipeline, held(gate), body)
    await until(lambda: gate.threads)
    gone.cancel()
    after = ask_large(pipeline, held(gate))
    gate.opened.set()
    await until(lambda: after.told)
    assert gone.told == []
    assert len(engine.lookups) == 1
    assert outcomes(pipeline) == {"CANCELLED": 1, "OK": 1}


async def test_a_deadline_that_passes_meanwhile_is_told(
    pipeline: RequestPipeline, engine: FakeEngine, gate: Gate
) -> None:
    late = RecordingCall(pipeline, asked(pipeline, held(gate), timeout_s=60.0))
    pipeline.submit(late, LARGE)
    await until(lambda: gate.threads)
    late.deadline_s = perf_counter()
    gate.opened.set()
    await until(lambda: late.told)
    assert isinstance(late.error, DeadlineExceededError)
    assert engine.lookups == []


async def test_no_more_than_so_many_bytes_wait_to_be_decoded(
    pipeline: RequestPipeline, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_executor, "WAITING_BYTES_MAX", 2 * len(LARGE))
    waiting = [ask_large(pipeline, held(gate)) for _ in range(2)]
    over = ask_large(pipeline, held(gate))
    assert isinstance(over.error, OverloadedError)
    assert f"{2 * len(LARGE)} of other large requests and answers wait" in over.error.message
    small = ask(pipeline)
    await until(lambda: small.told)
    gate.opened.set()
    await until(lambda: all(call.told for call in waiting))
    again = ask_large(pipeline, held(gate))
    await until(lambda: again.told)
    assert outcomes(pipeline) == {"RESOURCE_EXHAUSTED": 1, "OK": 4}


class WriterOf(RecordingWriter):
    """A writer of a request from ``origin``."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self._origin = origin

    @property
    def origin(self) -> object:
        return self._origin


async def test_a_caller_takes_no_more_than_its_share_and_its_turn_of_the_thread(
    pipeline: RequestPipeline, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_executor, "WAITING_BYTES_MAX", 6 * len(LARGE))

    def ask_as(origin: str) -> RecordingCall:
        call = RecordingCall(pipeline, asked(pipeline, held(gate)), writer=WriterOf(origin))
        pipeline.submit(call, LARGE)
        return call

    many = [ask_as("A") for _ in range(3)]
    await until(lambda: gate.threads)
    over = ask_as("A")
    assert isinstance(over.error, OverloadedError)
    assert f"{3 * len(LARGE)} of other large requests and answers of this" in over.error.message
    other = ask_as("B")
    ended: list[RecordingCall] = []
    enqueue = pipeline.models.enqueue

    def note(request: LookupRequest, pending: PendingRequest) -> None:
        assert isinstance(pending, RecordingCall)
        ended.append(pending)
        enqueue(request, pending)

    monkeypatch.setattr(pipeline.models, "enqueue", note)
    gate.opened.set()
    await until(lambda: all(call.told for call in (*many, other)))
    assert [call is other for call in ended] == [False, False, True, False]
    again = ask_as("A")
    await until(lambda: again.told)
    assert outcomes(pipeline) == {"RESOURCE_EXHAUSTED": 1, "OK": 5}


async def test_a_request_that_is_late_when_its_turn_comes_is_not_decoded(
    pipeline: RequestPipeline, gate: Gate
) -> None:
    first = ask_large(pipeline, held(gate))
    await until(lambda: gate.threads)
    late = RecordingCall(pipeline, asked(pipeline, held(gate), timeout_s=60.0))
    pipeline.submit(late, LARGE)
    late.deadline_s = perf_counter()
    gate.opened.set()
    await until(lambda: first.told and late.told)
    assert isinstance(late.error, DeadlineExceededError)
    assert "while the body waited" in late.error.message
    assert len(gate.threads) == 1


async def test_the_thread_is_started_again_after_a_limit_of_threads(
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
    calls = [ask_large(pipeline, JSON) for _ in range(3)]
    await until(lambda: all(call.told for call in calls))
    assert [call.error.code for call in calls[:2]] == ["INTERNAL"] * 2
    assert "can't start new thread: second" in caplog.text
    again = ask_large(pipeline, JSON)
    await until(lambda: again.told)
    assert outcomes(pipeline) == {"INTERNAL": 2, "OK": 2}


async def test_a_lone_request_is_decoded_however_large_it_is(
    pipeline: RequestPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_executor, "WAITING_BYTES_MAX", 1)
    call = ask_large(pipeline, JSON)
    await until(lambda: call.told)
    assert outcomes(pipeline) == {"OK": 1}


def message(**more: object) -> bytes:
    return pb.EmbedRequest(keys=["user"], **more).SerializeToString()  # type: ignore[arg-type]


MANY = protobuf_codec.INLINE_BYTES_MAX + 1


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
def test_what_is_quick_to_read_is_decoded_now(codec: Codec, body: bytes, is_inline: bool) -> None:
    assert_decoded_now(codec, body, is_inline)


def assert_decoded_now(codec: Codec, body: bytes, is_inline: bool) -> None:
    now = codec.try_decode_inline(body, "", LIMITS)
    assert (now is not None) == is_inline
    if now is not None:
        assert np.array_equal(now.ids, codec.decode(body, "", LIMITS).ids)


def prediction(ids: int, dtype: str = "<i8") -> bytes:
    of_user = predictor_pb2.SparseFeatures(
        num_features=1,
        lengths=np.array([ids], "<i4").tobytes(),
        values=np.arange(ids, dtype=dtype).tobytes(),
    )
    request = predictor_pb2.PredictionRequest(batch_size=1, id_list_features=of_user)
    return request.SerializeToString()


Tensors = dict[str, np.ndarray]
DATATYPES = {"<i8": "INT64", "<i4": "INT32", "<f4": "FP32"}


def padded(ids: int) -> Tensors:
    return {"user": np.arange(ids).reshape(4, -1)}


def jagged(ids: int) -> Tensors:
    return {"user.ids": np.arange(ids), "user.lengths": np.array([ids], "<i4")}


def weighted(ids: int) -> Tensors:
    return {**jagged(ids), "user.weights": np.ones(ids, "<f4")}


def infer_message(tensors: Tensors) -> tuple[Codec, bytes]:
    message = open_inference_pb2.ModelInferRequest(model_name="shop")
    for name, one in tensors.items():
        message.inputs.add(name=name, datatype=DATATYPES[one.dtype.str], shape=one.shape)
        message.raw_input_contents.append(one.tobytes())
    return CODECS.infer_message, message.SerializeToString()


def infer_body(tensors: Tensors) -> tuple[Codec, bytes]:
    inputs = [
        {
            "name": name,
            "datatype": DATATYPES[one.dtype.str],
            "shape": one.shape,
            "parameters": {"binary_data_size": one.nbytes},
        }
        for name, one in tensors.items()
    ]
    head = json.dumps({"inputs": inputs}).encode()
    return CODECS.infer_binary(len(head)), head + b"".join(map(bytes, tensors.values()))


@pytest.mark.parametrize("min_seq", [None, b"0"])
def test_large_predictions_are_decoded_in_the_thread(min_seq: bytes | None) -> None:
    codec = CODECS.predict_from(min_seq)
    for ids, is_inline in ((1000, True), (INLINE_BYTES_MAX // 4, False)):
        assert_decoded_now(codec, prediction(ids), is_inline)
        assert np.array_equal(codec.decode(prediction(ids), "", LIMITS).ids, np.arange(ids))


@pytest.mark.parametrize("in_form", [infer_message, infer_body])
@pytest.mark.parametrize(
    ("tensors", "is_inline"),
    [
        (padded(1000), True),
        (weighted(1000), True),
        (jagged(INLINE_BYTES_MAX // 4), True),
        (padded(INLINE_BYTES_MAX // 4), False),
        (weighted(INLINE_BYTES_MAX // 6), False),
    ],
)
def test_large_tensors_that_are_converted_are_decoded_in_the_thread(
    in_form: Callable[[Tensors], tuple[Codec, bytes]], tensors: Tensors, is_inline: bool
) -> None:
    codec, body = in_form(tensors)
    assert_decoded_now(codec, body, is_inline)
    ids, *_ = tensors.values()
    assert np.array_equal(codec.decode(body, "", LIMITS).ids, ids.ravel())


@pytest.mark.parametrize("count_max", [100, 1999])
def test_what_is_quick_to_read_has_no_more_values_than_it_may(count_max: int) -> None:
    body = message(string_keys=["user"], string_ids=["a"] * 2000, lengths=[2000])
    assert PROTOBUF.try_decode_inline(body, "", Limits(request_values_max=count_max)) is None
    assert PROTOBUF.try_decode_inline(body, "", LIMITS) is not None


SMALL_LIMITS = Limits(
    request_features_max=3,
    request_ids_max=1000,
    request_examples_max=100,
    request_values_max=2000,
    request_text_bytes_max=100_000,
)


@pytest.mark.parametrize(
    ("codec", "body", "said"),
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
def test_what_costs_too_much_is_refused_with_its_limit_and_setting(
    codec: Codec, body: bytes, said: str
) -> None:
    with pytest.raises(RequestTooLargeError) as caught:
        codec.decode(body, "", SMALL_LIMITS)
    name = said.removeprefix("--").replace("-", "_")
    assert f"the limit is {getattr(SMALL_LIMITS, name)} ({said})" in caught.value.message
    assert caught.value.field
