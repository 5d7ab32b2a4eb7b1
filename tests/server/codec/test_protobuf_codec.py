"""Tests of decoding EmbedRequest and encoding EmbedResponse, against the generated classes."""

import contextlib
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import fields
from server.fake_engine import FakeEngine, make_request, model_info
from server.fake_models import ruled_info, unpooled_info
from server.strategies import bags_of, bags_of_ids, weights_or_none

from embedserve.codec import protobuf_codec
from embedserve.codec.embed_request_fields import LENGTHS_TAG
from embedserve.codec.model_description import model_message
from embedserve.codec.protobuf_codec import ProtobufDecoder, encode_error, try_encode_inline
from embedserve.codec.template_cache import TEMPLATES_MAX
from embedserve.config import DEFAULT_LIMITS, Limits
from embedserve.errors import EmbedServeError, InvalidRequestError, OverloadedError
from embedserve.lookup_types import LookupRequest, LookupResult
from embedserve_proto import embedding_pb2 as pb

RULED = ruled_info()
UNPOOLED = FakeEngine(unpooled_info())


DECODER = ProtobufDecoder()


def encoded(result: LookupResult) -> bytes:
    """Returns the whole message; checks the reported length of its parts."""
    inline = try_encode_inline(result)
    assert inline is not None
    parts, nbytes = inline
    whole = b"".join(parts)
    assert len(whole) == nbytes
    return whole


def decoded(body: bytes, model: str = "", limits: Limits = DEFAULT_LIMITS) -> LookupRequest:
    """Returns the decoded request. Checks that decoding a small message whole and field by field
    agree."""
    outcomes: list[LookupRequest | EmbedServeError] = []
    for small_bytes in (protobuf_codec.SMALL_BYTES, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protobuf_codec, "SMALL_BYTES", small_bytes)
            try:
                outcomes.append(DECODER.decode_request(body, model, limits))
            except EmbedServeError as error:
                outcomes.append(error)
    whole, by_field = outcomes
    if isinstance(whole, EmbedServeError):
        assert isinstance(by_field, EmbedServeError)
        assert (by_field.code, by_field.message) == (whole.code, whole.message)
        raise whole
    assert isinstance(by_field, LookupRequest)
    for field in fields(LookupRequest):
        a, b = getattr(whole, field.name), getattr(by_field, field.name)
        assert type(a) is type(b)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
    return whole


@given(data=st.data())
def test_packed_and_bytes_fields_decode_to_the_same_request(data: st.DataObject) -> None:
    bags = data.draw(bags_of_ids())
    expected = make_request(bags, data.draw(weights_or_none(bags)))
    weights = np.zeros(0, np.float32) if expected.weights is None else expected.weights
    packed = pb.EmbedRequest(
        model="shop",
        keys=expected.features,
        ids=expected.ids.tolist(),
        lengths=expected.lengths.tolist(),
        weights=weights.tolist(),
    )
    as_bytes = pb.EmbedRequest(
        model="shop",
        keys=expected.features,
        ids_bytes=expected.ids.astype("<i8").tobytes(),
        lengths_bytes=expected.lengths.astype("<i4").tobytes(),
        weights_bytes=weights.astype("<f4").tobytes(),
    )
    for message in (packed, as_bytes):
        request = decoded(message.SerializeToString())
        assert (request.model, request.features) == ("shop", expected.features)
        assert request.batch_size == expected.batch_size
        assert request.ids.tolist() == expected.ids.tolist()
        assert request.lengths.tolist() == expected.lengths.tolist()
        assert (request.weights is None) == (weights.size == 0)
        assert request.weights is None or request.weights.tolist() == weights.tolist()
        assert (request.ids.dtype, request.lengths.dtype) == (
            np.dtype(np.int64),
            np.dtype(np.int32),
        )


@given(data=st.data())
def test_string_ids_are_placed_at_the_positions_of_their_keys(data: st.DataObject) -> None:
    bags = data.draw(bags_of(RULED))
    weights = data.draw(weights_or_none(bags))
    expected = make_request(bags, weights)
    flat = {feature: [one for bag in given for one in bag] for feature, given in bags.items()}
    message = pb.EmbedRequest(
        keys=list(bags),
        ids=[one for ids in flat.values() for one in ids if isinstance(one, int)],
        lengths=expected.lengths.tolist(),
        weights=[] if expected.weights is None else expected.weights.tolist(),
        string_keys=sorted(expected.string_features),
        string_ids=[one for ids in flat.values() for one in ids if isinstance(one, str)],
    )
    request = decoded(message.SerializeToString())
    assert request.ids.tolist() == expected.ids.tolist()
    assert request.string_features == expected.string_features
    assert (request.strings or {}) == (expected.strings or {})
    if request.weights is not None:
        assert expected.weights is not None
        assert request.weights.tolist() == expected.weights.tolist()


VALID_FIELDS: dict[str, Any] = {"keys": ["user", "tag"], "ids": [1, 2, 3], "lengths": [1, 1, 0, 1]}

INVALID_CHANGES = [
    ({"keys": []}, "keys", "is empty"),
    ({"keys": ["user", "user"]}, "keys", "'user' twice"),
    ({"lengths": []}, "lengths", "empty batch"),
    ({"lengths": [1, 1, 1]}, "lengths", "3 entries, not a multiple of the 2 keys"),
    ({"weights": [1.0, 2.0]}, "weights", "has 2 for 3 ids"),
    ({"ids": [1], "lengths": [1, 0], "weights": [1.0, 2.0]}, "weights", "has 2 for 1 id:"),
    ({"ids_bytes": bytes(24)}, "ids", "ids and ids_bytes are both given"),
    ({"lengths_bytes": bytes(16)}, "lengths", "both given"),
    ({"weights": [1.0], "weights_bytes": bytes(4)}, "weights", "both given"),
    ({"ids": [], "ids_bytes": bytes(7)}, "ids_bytes", "has 7 bytes, not a multiple of 8"),
    ({"lengths": [], "lengths_bytes": bytes(5)}, "lengths_bytes", "has 5 bytes, not a multiple"),
    ({"string_keys": ["user", "user"]}, "string_keys", "'user' twice"),
    ({"string_keys": ["title"]}, "string_keys", "names 'title', keys does not"),
    ({"string_ids": ["a"]}, "lengths", "add up to 3, but there are 4 ids"),
    ({"string_keys": ["tag"]}, "string_ids", "has 0 ids, the lengths of string_keys add up to 1"),
    (
        {"string_keys": ["tag"], "ids": [1], "string_ids": ["a", "b"]},
        "string_ids",
        "has 2 ids, the lengths of string_keys add up to 1",
    ),
    (
        {"string_keys": ["tag"], "lengths": [1, 4, -1, 0], "string_ids": ["a"]},
        "lengths[2]",
        "is -1",
    ),
    ({"output_dtype": 2}, "output_dtype", "is 2, expected FLOAT32 (0) or FLOAT16 (1)"),
    ({"output_dtype": -1}, "output_dtype", "is -1, expected"),
    ({"weights_bytes": bytes(3)}, "weights_bytes", "has 3 bytes, not a multiple of 4"),
]


@pytest.mark.parametrize(("change", "field", "problem"), INVALID_CHANGES)
def test_invalid_message_is_rejected_with_field_and_value(
    change: dict[str, Any], field: str, problem: str
) -> None:
    decoded(pb.EmbedRequest(**VALID_FIELDS).SerializeToString())
    body = pb.EmbedRequest(**(VALID_FIELDS | change)).SerializeToString()
    with pytest.raises(InvalidRequestError) as caught:
        decoded(body)
    assert caught.value.field == field
    assert problem in caught.value.message


def test_duplicate_key_among_very_many_is_found() -> None:
    """Guards against comparing each key with each other key, which would take minutes."""
    keys = [f"feature_{i}" for i in range(100_000)]
    body = pb.EmbedRequest(keys=[*keys, keys[-1]], lengths=[0]).SerializeToString()
    with pytest.raises(InvalidRequestError, match="'feature_99999' twice"):
        decoded(body, "", Limits(request_features_max=200_000))


@given(body=st.binary(max_size=80))
@example(b"\x13C")  # two groups without an end
def test_random_bytes_are_decoded_or_rejected(body: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        request = decoded(body)
        assert request.lengths.size == len(request.features) * request.batch_size


def test_malformed_protobuf_is_reported_as_no_embed_request() -> None:
    with pytest.raises(InvalidRequestError, match="body is not an EmbedRequest"):
        decoded(b'{"features": {}}')


DTYPES = [(np.float32, "<f4", pb.FLOAT32), (np.float16, "<f2", pb.FLOAT16)]


@pytest.mark.parametrize(("dtype", "little_endian", "output_dtype"), DTYPES)
@given(
    batch_size=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_encoded_response_equals_the_generated_message(
    dtype: type[np.floating],
    little_endian: str,
    output_dtype: pb.OutputDType,
    batch_size: int,
    seed: int,
    cuts: list[float],
) -> None:
    """Covers results that were looked up whole or in chunks."""
    values = np.random.default_rng(seed).standard_normal((batch_size, 9)).astype(dtype)
    first, *more = np.split(values, sorted(int(cut * batch_size) for cut in cuts))
    result = LookupResult(model_info(), first, extra_chunks=more)
    response = pb.EmbedResponse.FromString(encoded(result))
    assert response == pb.EmbedResponse(
        model="shop",
        version=7,
        keys=["user", "movie", "tag"],
        length_per_key=[4, 3, 2],
        batch_size=batch_size,
        values=values.astype(little_endian).tobytes(),
        output_dtype=output_dtype,
    )


@pytest.mark.parametrize(("dtype", "little_endian", "output_dtype"), DTYPES)
@given(data=st.data())
def test_encoded_unpooled_response_equals_the_generated_message(
    dtype: type[np.floating],
    little_endian: str,
    output_dtype: pb.OutputDType,
    data: st.DataObject,
) -> None:
    bags = data.draw(bags_of(UNPOOLED.model))
    lengths = np.array(UNPOOLED.expected_lengths(bags), np.int32)
    values, unknown = UNPOOLED.expected(bags).astype(dtype), UNPOOLED.expected_unknown(bags)
    whole = encoded(LookupResult(UNPOOLED.model, values, unknown, lengths))
    assert pb.EmbedResponse.FromString(whole) == pb.EmbedResponse(
        model="sequence",
        version=7,
        keys=["item@t_item", "last", "tag", "item@t_again"],
        length_per_key=[4] * 4,
        batch_size=lengths.shape[1],
        values=values.astype(little_endian).tobytes(),
        output_dtype=output_dtype,
        unknown_ids=unknown,
        lengths=lengths.reshape(-1).tolist(),
    )


@pytest.mark.parametrize("batch_size", [1, 31, 32, 33, 4095, 4096])
def test_batch_sizes_around_varint_boundaries_are_encoded(batch_size: int) -> None:
    model = model_info(features={"user": (7, 1)})
    values = np.arange(batch_size, dtype=np.float32).reshape(batch_size, 1)
    response = pb.EmbedResponse.FromString(encoded(LookupResult(model, values)))
    assert response.batch_size == batch_size
    assert response.values == values.astype("<f4").tobytes()


def test_slice_of_a_batch_is_encoded_alone() -> None:
    batch = np.arange(45, dtype=np.float32).reshape(5, 9)
    response = pb.EmbedResponse.FromString(encoded(LookupResult(model_info(), batch[2:4])))
    assert np.frombuffer(response.values, "<f4").tolist() == batch[2:4].reshape(-1).tolist()


def test_big_endian_values_are_sent_little_endian() -> None:
    values = np.arange(9, dtype=">f4").reshape(1, 9)
    response = pb.EmbedResponse.FromString(encoded(LookupResult(model_info(), values)))
    assert np.frombuffer(response.values, "<f4").tolist() == list(range(9))


def test_stream_error_contains_only_the_error() -> None:
    response = pb.EmbedResponse.FromString(encode_error(OverloadedError("full", "queue")))
    error = pb.Error(code="RESOURCE_EXHAUSTED", message="full", field="queue")
    assert response == pb.EmbedResponse(error=error)


def test_model_is_described_with_its_tables() -> None:
    message = model_message(model_info(), {})
    assert list(message.features) == ["user", "movie", "tag"]
    assert list(message.length_per_key) == [4, 3, 2]
    assert not message.unpooled
    tables = [(table.name, table.num_embeddings, table.sharding) for table in message.tables]
    assert tables == [
        ("t_user", 7, "table_wise"),
        ("t_movie", 11, "table_wise"),
        ("t_tag", 5, "table_wise"),
    ]


def test_table_is_described_with_its_id_rule() -> None:
    rules = {table.name: table.ids for table in model_message(RULED, {}).tables}
    assert rules == {
        "t_user": pb.IdRule(rule="map", id_type="int64", entries=5, unknown="skip"),
        "t_movie": pb.IdRule(rule="rows", id_type="int64", unknown="row", default_row=3),
        "t_tag": pb.IdRule(
            rule="map", id_type="string", entries=4, unknown="skip", examples=["drama", "comédie"]
        ),
        "t_day": pb.IdRule(rule="modulo", id_type="int64", modulus=4, offset=2, unknown="error"),
        "t_shelf": pb.IdRule(rule="map", id_type="int64", entries=3, unknown="error"),
    }


def test_unpooled_model_is_described_as_unpooled() -> None:
    message = model_message(UNPOOLED.model, {})
    assert message.unpooled
    assert {table.pooling for table in message.tables} == {"none"}


def test_messages_with_the_same_keys_share_one_cached_template() -> None:
    """Guards against one template per message, which would evict the templates of other callers."""
    plain = pb.EmbedRequest(keys=["of", "others"], ids_bytes=bytes(8), lengths_bytes=bytes(8))
    decoded(plain.SerializeToString())
    rounded = pb.EmbedRequest(
        keys=["rounded"], ids_bytes=bytes(8), lengths_bytes=b"\1\0\0\0", output_dtype=pb.FLOAT16
    )
    for _ in range(2 * TEMPLATES_MAX):
        assert decoded(rounded.SerializeToString()).output_dtype == "float16"
    cached = [one.features for one in DECODER.templates.templates]
    assert cached.count(("rounded",)) == 1
    assert ("of", "others") in cached


def outcome_of(decoder: ProtobufDecoder, body: bytes) -> object:
    try:
        request = decoder.decode_request(body)
    except EmbedServeError as error:
        return error.code, error.message
    return request.features, request.ids.tolist(), request.lengths.tolist(), request.batch_size


def test_message_with_a_cached_prefix_is_read_like_any_other() -> None:
    """Tries lengths that do not fit the keys, another field, and every cut of the messages."""
    decoder, keys = ProtobufDecoder(), ["user", "category"]
    start = pb.EmbedRequest(keys=keys, ids_bytes=bytes(range(32))).SerializeToString()
    given = [np.array(one, "<i4").tobytes() for one in ([2, 2], [1, 1, 2], [1, 1, 1, 1])]
    ends = [pb.EmbedRequest(lengths_bytes=one).SerializeToString() for one in given]
    ends.append(bytes([LENGTHS_TAG, 0]))
    ends.append(pb.EmbedRequest(string_keys=keys[1:]).SerializeToString())
    for body in [start + one for one in ends]:
        for end in range(len(body), 0, -1):
            expected = outcome_of(ProtobufDecoder(), body[:end])
            assert outcome_of(decoder, body[:end]) == expected
    assert len(decoder.templates.templates) == 1


def test_small_and_large_messages_are_read_alike() -> None:
    for ids in (range(100), range(5000)):  # some hundred bytes, and too many to read whole
        message = pb.EmbedRequest(keys=["user"], ids=ids, lengths=[len(ids)])
        assert decoded(message.SerializeToString()).ids.tolist() == list(ids)


@pytest.mark.parametrize("size", [1, 5000])
@pytest.mark.parametrize(
    ("field", "parts"),
    [("ids", (b"\x80", b"\x01")), ("lengths", (b"\x81", b"\x00")), ("weights", (b"ab", b"cd"))],
)
def test_varint_split_across_packed_fields_is_rejected(
    field: str, parts: tuple[bytes, bytes], size: int
) -> None:
    """Checks that each of several packed fields has whole numbers, as the library requires."""
    tag = bytes((pb.EmbedRequest.DESCRIPTOR.fields_by_name[field].number << 3 | 2,))
    message = pb.EmbedRequest(keys=["user"], ids=range(size), lengths=[size])
    body = message.SerializeToString() + b"".join(tag + bytes((len(one),)) + one for one in parts)
    with pytest.raises(DecodeError):
        pb.EmbedRequest.FromString(body)
    with pytest.raises(InvalidRequestError, match=r"ends within a number|not an EmbedRequest"):
        decoded(body)
