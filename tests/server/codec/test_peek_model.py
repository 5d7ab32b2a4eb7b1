"""Tests of finding a message's model without decoding: the same name as by decoding, or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve.codec.embed_request_fields import MODEL_FIELDS_MAX, peek_model
from embedserve.codec.open_inference import infer_messages
from embedserve.codec.protobuf_fields import varint
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.open_inference_pb2 import ModelInferRequest

MODEL_TAG = b"\x0a"
NAME = st.text(max_size=200)


@st.composite
def messages(draw: st.DrawFn) -> pb.EmbedRequest:
    return pb.EmbedRequest(
        model=draw(NAME),
        keys=draw(st.lists(st.text(max_size=5), max_size=4)),
        ids=draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)),
        lengths=draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)),
        weights=draw(st.lists(st.floats(width=32, allow_nan=False), max_size=4)),
        ids_bytes=draw(st.binary(max_size=300)),
        lengths_bytes=draw(st.binary(max_size=20)),
        string_ids=draw(st.lists(st.text(max_size=5), max_size=4)),
        output_dtype=draw(st.sampled_from([pb.FLOAT32, pb.FLOAT16])),
    )


@given(messages())
def test_peeked_model_equals_the_decoded_model(message: pb.EmbedRequest) -> None:
    assert peek_model(message.SerializeToString()) == message.model


@given(data=st.data(), message=messages(), unknown=st.lists(st.integers(100, 200), max_size=3))
def test_model_is_found_in_any_field_order_and_among_unknown_fields(
    data: st.DataObject, message: pb.EmbedRequest, unknown: list[int]
) -> None:
    fields = []
    for field, _ in message.ListFields():
        one = pb.EmbedRequest()
        one.MergeFrom(message)
        for other, _ in message.ListFields():
            if other.name != field.name:
                one.ClearField(other.name)
        fields.append(one.SerializeToString())
    for number in unknown:
        wire_type, rest = data.draw(
            st.sampled_from([(0, b"\x96\x01"), (1, bytes(8)), (2, b"\x03abc"), (5, bytes(4))])
        )
        fields.append(varint(number << 3 | wire_type) + rest)
    body = b"".join(data.draw(st.permutations(fields)))
    assert pb.EmbedRequest.FromString(body).model == message.model
    assert peek_model(body) == message.model


@given(st.binary(max_size=300))
def test_garbage_never_raises(body: bytes) -> None:
    assert isinstance(peek_model(body), str)


@given(message=messages(), end=st.integers(0, 1000))
def test_truncated_message_yields_a_prefix_of_the_model_name(
    message: pb.EmbedRequest, end: int
) -> None:
    found = peek_model(message.SerializeToString()[:end])
    assert message.model.startswith(found.rstrip("\ufffd")) or not found


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x0a",
        b"\x80" * 100,
        b"\xff" * 100,
        b"\x0b\x0a\x04shop",  # a group, which no serializer writes
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + b"\x0a\x04shop",
        b"\x08\x05",  # the model's field number with another type
    ],
)
def test_message_without_model_yields_an_empty_name(body: bytes) -> None:
    assert peek_model(body) == ""


@pytest.mark.parametrize("count", [MODEL_FIELDS_MAX - 1, MODEL_FIELDS_MAX])
def test_number_of_scanned_fields_is_bounded(count: int) -> None:
    body = b"\x18\x01" * count + MODEL_TAG + b"\x04shop"
    assert pb.EmbedRequest.FromString(body).model == "shop"
    assert peek_model(body) == ("shop" if count < MODEL_FIELDS_MAX else "")


def test_invalid_utf8_in_the_model_name_is_replaced() -> None:
    assert peek_model(MODEL_TAG + b"\x02\xff\xfe") == "\ufffd\ufffd"


def test_model_and_version_of_an_infer_request_are_found() -> None:
    for version, name in (("", "shop"), ("7", "shop@7")):
        message = ModelInferRequest(model_name="shop", model_version=version, id="x")
        assert infer_messages.peek_model(message.SerializeToString()) == name
    assert infer_messages.peek_model(ModelInferRequest(id="x").SerializeToString()) == ""
    assert infer_messages.peek_model(MODEL_TAG + b"\x09shop") == ""
