"""Tests of a request's min_seq in every format. Requests with a min_seq leave no templates."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from server.arrow_streams import stream_of
from server.open_inference import InferRequest, jagged
from server.predictions import prediction_request

from embedserve.codec.codec import Codec, Codecs
from embedserve.config import DEFAULT_LIMITS
from embedserve.errors import InvalidRequestError
from embedserve.lookup_types import LookupRequest
from embedserve_proto import embedding_pb2, open_inference_pb2

SEQ_MAX = 2**63 - 1
SEQS = (0, 1, 1234, 10**17, SEQ_MAX)
BAGS = {"user": [[1, 2], []]}
REQUESTS = 50


FIELDS = {
    "json": "min_seq",
    "protobuf": "min_seq",
    "arrow": "embedserve.min_seq",
    "infer": "parameters.min_seq",
    "infer binary": "parameters.min_seq",
    "infer message": "parameters.min_seq",
    "predict": "x-min-seq",
}
"""Name of min_seq in the errors of each format."""
each_format = pytest.mark.parametrize("name", FIELDS)


class Requests:
    """Requests of one format, with and without a min_seq, and their own codecs to decode them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.codecs = Codecs()

    def encode(self, min_seq: Any) -> tuple[Codec, bytes]:
        codecs, option = self.codecs, {} if min_seq is None else {"min_seq": min_seq}
        infer_request = InferRequest(jagged(BAGS), parameters=option)
        match self.name:
            case "json":
                return codecs.json, json.dumps({"features": BAGS} | option).encode()
            case "protobuf":
                message = embedding_pb2.EmbedRequest(keys=["user"], **option)
                message.ids_bytes = np.array([1, 2], "<i8").tobytes()
                message.lengths_bytes = np.array([2, 0], "<i4").tobytes()
                return codecs.protobuf, message.SerializeToString()
            case "arrow":
                table = pa.table({"user": pa.array(BAGS["user"], pa.list_(pa.int64()))})
                options = {name: str(value) for name, value in option.items()}
                return codecs.arrow, stream_of(table, options=options or None)
            case "infer":
                return codecs.infer, infer_request.json_body()
            case "infer binary":  # templates do not take numbers that line breaks follow
                body, headers = infer_request.binary_body()
                (json_bytes,) = map(int, headers.values())
                shown = json.dumps(min_seq).encode()
                head = body[:json_bytes].replace(
                    b'"min_seq": ' + shown, b'"min_seq":\n' + shown + b"\n"
                )
                return codecs.infer_binary(len(head)), head + body[json_bytes:]
            case "infer message":
                infer_message = infer_request.message("shop", is_raw=True)
                return codecs.infer_message, infer_message.SerializeToString()
        header = None if min_seq is None else str(min_seq).encode()
        body = prediction_request(("user",), BAGS).SerializeToString()
        return codecs.predict_from(header), body

    def decode(self, min_seq: Any = None) -> LookupRequest:
        codec, body = self.encode(min_seq)
        request = codec.decode(body, "shop", DEFAULT_LIMITS, is_inline=True)
        assert request.ids.tolist() == [1, 2]
        whole = codec.decode(body, "shop", DEFAULT_LIMITS)
        assert whole.min_seq == request.min_seq
        return request

    def templates(self) -> list[object]:
        """Returns all templates of the decoders."""
        codecs: Any = self.codecs
        decodes = codecs.protobuf.decode, codecs.infer.decode.func, codecs.infer_message.decode
        decoders = [decode.__self__ for decode in decodes]
        caches = [codecs.arrow.decode.__self__.schemas, *[one.templates for one in decoders]]
        return [template for cache in caches for template in cache.templates]


@each_format
def test_min_seq_is_read_and_defaults_to_none(name: str) -> None:
    one = Requests(name)
    for _ in range(2):  # the second uses what the first has cached
        assert one.decode().min_seq is None
        for seq in SEQS:
            assert one.decode(seq).min_seq == seq
            assert one.decode(seq).min_seq == seq


@each_format
def test_requests_with_min_seq_are_not_cached_as_templates(name: str) -> None:
    """Guards against one template per min_seq, which would evict the templates of other callers."""
    one = Requests(name)
    one.decode()
    before = one.templates()
    for seq in range(REQUESTS):
        one.decode(seq)
    assert one.templates() == before


@each_format
def test_negative_min_seq_is_rejected(name: str) -> None:
    assert_rejected(Requests(name), -1, "-1")


@pytest.mark.parametrize("name", ["json", "arrow", "infer", "infer binary", "predict"])
def test_min_seq_beyond_int64_is_rejected(name: str) -> None:
    assert_rejected(Requests(name), 2**63, str(2**63))


@pytest.mark.parametrize("name", ["arrow", "predict"])
@pytest.mark.parametrize("text", ["", "+1", " 1", "1.0", "1_0", "\u0663", "x" * 70, "0" * 20])
def test_non_numeric_min_seq_text_is_rejected(name: str, text: str) -> None:
    expected_value = text if name == "arrow" else text.encode().decode("latin-1")
    assert_rejected(Requests(name), text, repr(expected_value)[:60])


@pytest.mark.parametrize("value", [1.5, 1.0, True, "7", [7], {}, 10**4000])
def test_non_integer_json_min_seq_is_rejected(value: Any) -> None:
    assert_rejected(Requests("json"), value, json.dumps(value)[:60])


@pytest.mark.parametrize("value", [True, "7", 1.5])
def test_min_seq_parameter_of_another_type_is_rejected(value: Any) -> None:
    one = Requests("infer message")
    codec, body = one.encode(1)
    message = open_inference_pb2.ModelInferRequest.FromString(body)
    kind = {bool: "bool_param", str: "string_param", float: "double_param"}[type(value)]
    setattr(message.parameters["min_seq"], kind, value)
    with pytest.raises(InvalidRequestError, match=f"min_seq is {value!r}, expected an integer"):
        codec.decode(message.SerializeToString(), "", DEFAULT_LIMITS, is_inline=True)


@pytest.mark.parametrize("value", [1.5, True, "7", [7], {}])
def test_json_min_seq_parameter_of_another_type_is_rejected(value: Any) -> None:
    codec, body = Requests("infer").encode(value)
    with pytest.raises(InvalidRequestError, match=r"parameters\.min_seq"):
        codec.decode(body, "shop", DEFAULT_LIMITS, is_inline=True)


def assert_rejected(one: Requests, min_seq: Any, expected_value: str) -> None:
    """Fails unless the error names field and value."""
    (codec, body), field = one.encode(min_seq), FIELDS[one.name]
    for is_inline in (True, False):
        with pytest.raises(InvalidRequestError) as caught:
            codec.decode(body, "shop", DEFAULT_LIMITS, is_inline=is_inline)
        assert caught.value.field == field
        shown = caught.value.message.removeprefix(f"{field} is ")
        assert shown.startswith((expected_value, repr(expected_value)))
        assert caught.value.message.endswith(f"expected an integer from 0 to {SEQ_MAX}")
