"""Tests of the bytes on the wire: little-endian, complete, and read back without a copy."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve_client.core.batch import batch_of
from embedserve_client.core.messages import AnswerReader, request_of
from embedserve_client.core.result import EmbedResult
from embedserve_client.errors import EmbedServeClientError, InvalidRequest, Overloaded, ServerError
from embedserve_proto import embedding_pb2 as pb

INT64 = st.integers(-(2**63), 2**63 - 1)


def response_message(values: Any, **fields: Any) -> pb.EmbedResponse:
    array = np.array(values, dtype="<f2" if fields.get("output_dtype") else "<f4")
    given: dict[str, Any] = {"batch_size": len(array), "keys": ["user"], "length_per_key": [2]}
    given |= fields
    return pb.EmbedResponse(model="shop", version=7, values=array.tobytes(), **given)


def test_arrays_are_encoded_as_little_endian_bytes() -> None:
    features = {"user": np.array([1, 258], dtype=">i8")}
    message = request_of(batch_of(features, {"user": np.array([1.0, 0.5])}), "shop")

    assert message.ids_bytes == bytes.fromhex("0100000000000000 0201000000000000")
    assert message.lengths_bytes == bytes.fromhex("01000000 01000000")
    assert message.weights_bytes == bytes.fromhex("0000803f 0000003f")
    assert (message.model, list(message.keys)) == ("shop", ["user"])
    assert [*message.ids, *message.lengths, *message.weights] == []


@pytest.mark.parametrize(("name", "number"), [("float32", pb.FLOAT32), ("float16", pb.FLOAT16)])
def test_output_dtype_is_encoded_as_its_enum_number(name: Any, number: pb.OutputDType) -> None:
    assert request_of(batch_of({"user": [1]}), None, name).output_dtype == number


def test_output_keys_are_encoded_unchanged() -> None:
    batch = batch_of({"user": [1]})
    assert list(request_of(batch, None).output_keys) == []
    assert list(request_of(batch, None, output_keys=("movie", "user")).output_keys) == [
        "movie",
        "user",
    ]


@pytest.mark.parametrize("keys", ["movie", [1], None, 7, {"movie"}])
def test_invalid_output_keys_are_rejected(keys: Any) -> None:
    with pytest.raises(InvalidRequest, match="is no list of keys") as caught:
        request_of(batch_of({"user": [1]}), None, output_keys=keys)
    assert caught.value.field == "output_keys"


@pytest.mark.parametrize("model", [3, b"shop", ["shop"]])
def test_model_that_is_no_string_is_rejected(model: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^model: .* is no string$") as caught:
        request_of(batch_of({"user": [1]}), model)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("key", "model", "output_key"),
    [("\ud800", "shop", "user"), ("user", "\ud800", "user"), ("user", "shop", "\ud800")],
)
def test_half_of_a_surrogate_pair_in_a_name_is_rejected(
    key: str, model: str, output_key: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"'\\ud800' is no text: half of a surrogate pair"):
        request_of(batch_of({key: [1]}), model, output_keys=[output_key])


def test_missing_model_and_weights_leave_fields_empty() -> None:
    message = request_of(batch_of({"user": [1]}), None)

    assert (message.model, message.weights_bytes) == ("", b"")


@st.composite
def requests(draw: st.DrawFn) -> dict[str, list[list[int]]]:
    keys = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True))
    batch_size = draw(st.integers(1, 4))
    bags = st.lists(st.lists(INT64, max_size=5), min_size=batch_size, max_size=batch_size)
    return {key: draw(bags) for key in keys}


@given(features=requests())
def test_encoded_requests_decode_to_the_same_bags(features: dict[str, list[list[int]]]) -> None:
    sent = request_of(batch_of(features), None).SerializeToString()
    message = pb.EmbedRequest.FromString(sent)

    lengths = np.frombuffer(message.lengths_bytes, "<i4")
    bags = np.split(np.frombuffer(message.ids_bytes, "<i8"), np.cumsum(lengths)[:-1])
    batch_size = len(lengths) // len(message.keys)
    decoded = {
        key: [bag.tolist() for bag in bags[at * batch_size : (at + 1) * batch_size]]
        for at, key in enumerate(message.keys)
    }
    assert decoded == features


@given(features=requests())
def test_lists_and_pairs_of_arrays_encode_to_the_same_bytes(
    features: dict[str, list[list[int]]],
) -> None:
    pairs = {
        key: (np.array(list(chain(*bags)), dtype=np.int64), np.array([len(bag) for bag in bags]))
        for key, bags in features.items()
    }

    assert request_of(batch_of(pairs), None) == request_of(batch_of(features), None)


def test_values_are_a_view_of_the_response() -> None:
    result = AnswerReader().read(response_message([[1, 2], [3, 4]]), batch_size=2)

    assert result.values.tolist() == [[1, 2], [3, 4]]
    assert result.values.dtype == np.float32
    assert not result.values.flags.owndata
    assert not result.values.flags.writeable


def test_float16_values_are_a_view_of_the_response() -> None:
    message = response_message([[1, 0.1], [-7e-8, np.inf]], output_dtype=pb.FLOAT16)
    result = AnswerReader().read(message, batch_size=2)

    expected = np.array([[1, 0.1], [-7e-8, np.inf]], np.float16)
    assert result.values.dtype == np.float16
    np.testing.assert_array_equal(result.values, expected)
    assert not result.values.flags.owndata


def test_unknown_output_dtype_raises_server_error() -> None:
    with pytest.raises(ServerError, match="output_dtype 7, which is not float32 or float16"):
        AnswerReader().read(response_message([[1, 2]], output_dtype=7), batch_size=1)


def test_layout_is_reused_until_it_changes() -> None:
    reader = AnswerReader()
    first = reader.read(response_message([[1, 2]]), 1)
    again = reader.read(response_message([[3, 4]]), 1)
    changed = reader.read(response_message([[5, 6]], keys=["film"]), 1)
    narrower = reader.read(response_message([[7]], length_per_key=[1], keys=["film"]), 1)

    assert again.layout is first.layout
    assert (changed.keys, changed["film"].tolist()) == (("film",), [[5, 6]])
    assert narrower["film"].tolist() == [[7]]


def test_string_ids_are_encoded_with_their_keys() -> None:
    message = request_of(batch_of({"title": ["a", "b"], "user": [1]}), None)

    assert (list(message.string_keys), list(message.string_ids)) == (["title"], ["a", "b"])
    assert message.ids_bytes == bytes.fromhex("0100000000000000")
    assert message.lengths_bytes == bytes.fromhex("02000000 01000000")


@pytest.mark.parametrize("field", ["unknown_ids", "missing_ids"])
def test_counts_of_ids_are_a_dict_that_is_empty_without_such_ids(field: str) -> None:
    reader, counts = AnswerReader(), {"user": 3}

    read = reader.read(response_message([[1, 2]], **{field: counts}), 1)
    assert getattr(read, field) == counts
    assert getattr(reader.read(response_message([[1, 2]]), 1), field) == {}


@pytest.mark.parametrize("seq", [0, 1234, 2**63 - 1])
def test_seq_is_read_from_the_response_and_is_otherwise_none(seq: int) -> None:
    reader = AnswerReader()

    assert reader.read(response_message([[1, 2]], seq=seq), 1).seq == seq
    assert reader.read(response_message([[1, 2]]), 1).seq is None


def unpooled_message(values: Any, lengths: list[int], **fields: Any) -> pb.EmbedResponse:
    given_fields = {"keys": ["movie", "user"], "length_per_key": [2, 2], "batch_size": 2} | fields
    return response_message(values, lengths=lengths, **given_fields)


def test_unpooled_result_is_a_view_with_lengths() -> None:
    result = AnswerReader().read(unpooled_message([[1, 2], [3, 4], [5, 6]], [0, 2, 1, 0]), 2)

    assert not result.is_pooled
    assert result.values.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert not result.values.flags.owndata
    assert result.lengths is not None
    assert (result.lengths.dtype, result.lengths.tolist()) == (np.dtype(np.int32), [[0, 2], [1, 0]])


def test_unpooled_result_without_ids_is_empty() -> None:
    result = AnswerReader().read(unpooled_message(np.zeros((0, 2)), [0, 0, 0, 0]), 2)

    assert not result.is_pooled
    assert result["user"].values.shape == (0, 2)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (unpooled_message([[1, 2]], [1, 0, 0]), "2 keys of 2 examples with 3 lengths"),
        (unpooled_message([[1, 2]], [1, 1, -1, 0]), "2 keys of 2 examples with 4 lengths"),
        (unpooled_message([[1, 2]], [1, 1, 0, 0]), "answered 2 examples in 8 bytes, not 2 in 16"),
        (
            unpooled_message([[1, 2]], [1, 0, 0, 0], length_per_key=[2, 1]),
            r"rows of \(2, 1\) numbers",
        ),
        (response_message([[1, 2]]), r"answered 1 examples in 8 bytes, not 2 in 16"),
        (
            response_message([[1]] * 2, output_dtype=1),
            r"answered 2 examples in 4 bytes, not 2 in 8",
        ),
        (response_message([[1, 2]], batch_size=2), r"answered 2 examples in 8 bytes, not 2 in 16"),
        (response_message([[1], [2]], keys=[]), "0 keys with 1 lengths"),
        (response_message([[1], [2]], length_per_key=[1, 1]), "1 keys with 2 lengths"),
        (pb.EmbedResponse(), "0 keys with 0 lengths"),
        (
            response_message([[1, 2]] * 2, keys=["a", "a"], length_per_key=[1, 1]),
            r"keys \('a', 'a'\) of lengths \(1, 1\)",
        ),
        (
            response_message([[1, 2]] * 2, keys=["a", "b"], length_per_key=[-2, 4]),
            r"keys \('a', 'b'\) of lengths \(-2, 4\)",
        ),
    ],
)
def test_inconsistent_response_raises_server_error(message: Any, why: str) -> None:
    with pytest.raises(ServerError, match=why):
        AnswerReader().read(message, batch_size=2)


def test_malformed_response_bytes_raise_server_error() -> None:
    with pytest.raises(ServerError, match="no EmbedResponse"):
        AnswerReader().read_bytes(b"<html>", batch_size=1)


def test_outcome_is_the_result_or_the_error_of_the_response() -> None:
    error = pb.Error(code="RESOURCE_EXHAUSTED", message="queue full", field="")
    rejected = AnswerReader().outcome(pb.EmbedResponse(error=error), batch_size=1)
    successful = AnswerReader().outcome(response_message([[1, 2]]), batch_size=1)

    assert isinstance(rejected, Overloaded)
    assert str(rejected) == "queue full"
    assert isinstance(successful, EmbedResult)
    assert successful.result() is successful
    with pytest.raises(EmbedServeClientError, match="queue full"):
        rejected.result()
