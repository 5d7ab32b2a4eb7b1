"""Tests of seq and the counts of missing ids in responses of every format. Without them, responses
do not change."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from msgspec.structs import replace
from server.arrow_streams import metadata_in, read_table
from server.codecs import CODECS, encoded
from server.fake_models import model_info, unpooled_info

from embedserve.codec.codec import Codec
from embedserve.codec.open_inference.outputs import ResponseOptions
from embedserve.lookup_types import LookupResult, OutputOptions
from embedserve.model_info import ModelInfo
from embedserve_proto import embedding_pb2, open_inference_pb2

SEQS = (0, 1, 127, 128, 1234, 2**53 + 1, 2**63 - 1)
LENGTHS = np.array([[2, 0, 1], [0, 0, 0], [1, 1, 1], [2, 0, 1]], np.int32)
UNKNOWN = {"tag": 3}
MISSING = ({"user": 1}, {"user": 2**40, "tag": 7})
SEQS_MANY = 3000


def results(options: OutputOptions | None) -> Iterator[LookupResult]:
    """Yields results of every shape: whole, of one example, in chunks, of some keys, unpooled."""
    pooled, unpooled = model_info(), unpooled_info()
    for dtype in (np.float32, np.float16):
        values = np.arange(45, dtype=dtype).reshape(5, 9)
        rows = np.arange(4 * LENGTHS.sum(), dtype=dtype).reshape(-1, 4)
        for unknown in (None, UNKNOWN):
            yield LookupResult(pooled, values, unknown, output=options)
            yield LookupResult(pooled, values[:1], unknown, output=options)
            chunks = [values[2:4], values[4:]]
            yield LookupResult(pooled, values[:2], unknown, None, chunks, options)
            part = pooled.with_keys(("tag", "user"))
            some = np.ascontiguousarray(values[:, [0, 1, 2, 3, 7, 8]])
            yield LookupResult(part, some, unknown, output=options)
            yield LookupResult(unpooled, rows, unknown, LENGTHS, output=options)


def json_seq(response: bytes) -> tuple[bytes, int | None]:
    """Returns (the response without its seq, the seq)."""
    parsed = json.loads(response)
    seq = parsed.pop("seq", None)
    if seq is not None:
        end = b',"seq":%d}' % seq
        assert response.endswith(end)
        response = response[: -len(end)] + b"}"
    return response, seq


def protobuf_seq(response: bytes) -> tuple[bytes, int | None]:
    message = embedding_pb2.EmbedResponse.FromString(response)
    if not message.HasField("seq"):
        return response, None
    end = embedding_pb2.EmbedResponse(seq=message.seq).SerializeToString()
    assert response.endswith(end)
    return response[: -len(end)], message.seq


def arrow_seq(response: bytes) -> tuple[bytes, int | None]:
    """Returns (table and metadata without the seq, the seq). The entry changes the layout of the
    schema, so bytes cannot be compared."""
    table = read_table(response)
    metadata = metadata_in(table)
    seq = metadata.pop("seq", None)
    assert seq is None or table.schema.metadata[b"embedserve.seq"] == b"%d" % seq
    return repr((metadata, table.to_pydict())).encode(), seq


def infer_seq(response: bytes) -> tuple[bytes, int | None]:
    head, end = json.JSONDecoder().raw_decode(response.decode("latin-1"))
    parameters = head.get("parameters", {})
    seq = parameters.pop("seq", None)
    if not parameters:
        head.pop("parameters", None)
    return json.dumps(head).encode() + response[end:], seq


def parameter_of(message: Any) -> int | None:
    if "seq" not in message.parameters:
        return None
    seq: int = message.parameters["seq"].int64_param
    del message.parameters["seq"]
    return seq


def _rewritten(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def message_seq(response: bytes) -> tuple[bytes, int | None]:
    message = open_inference_pb2.ModelInferResponse.FromString(response)
    seq = parameter_of(message)
    return _rewritten(message), seq


def streamed_seq(response: bytes) -> tuple[bytes, int | None]:
    message = open_inference_pb2.ModelStreamInferResponse.FromString(response)
    seq = parameter_of(message.infer_response)
    return _rewritten(message), seq


Read = Callable[[bytes], tuple[bytes, int | None]]
WITH_ID, BINARY = ResponseOptions("id7"), ResponseOptions(is_binary=True)
FORMATS: dict[str, tuple[Codec, object, Read]] = {
    "json": (CODECS.json, None, json_seq),
    "protobuf": (CODECS.protobuf, None, protobuf_seq),
    "arrow": (CODECS.arrow, None, arrow_seq),
    "arrow by key": (CODECS.arrow, "keys", arrow_seq),
    "infer": (CODECS.infer, WITH_ID, infer_seq),
    "infer binary": (CODECS.infer, BINARY, infer_seq),
    "infer message": (CODECS.infer_message, WITH_ID, message_seq),
    "infer streamed": (CODECS.infer_streamed, WITH_ID, streamed_seq),
}
each_format = pytest.mark.parametrize("name", FORMATS)


def options_of(format_options: object) -> OutputOptions | None:
    return None if format_options is None else OutputOptions(format_options=format_options)


@each_format
def test_seq_is_added_without_other_changes(name: str) -> None:
    codec, format_options, read = FORMATS[name]
    for result in results(options_of(format_options)):
        plain, none = read(encoded(codec, result))
        assert none is None
        for seq in SEQS:
            assert read(encoded(codec, replace(result, seq=seq))) == (plain, seq)


@each_format
def test_response_without_seq_is_unchanged(name: str) -> None:
    """Compares with a model that has never had a seq, also with cached prefixes."""
    codec, format_options, _ = FORMATS[name]
    options = options_of(format_options)
    for fresh, result in zip(results(options), results(options), strict=True):
        for seq in SEQS:
            encoded(codec, replace(result, seq=seq))
        assert encoded(codec, result) == encoded(codec, fresh)


def infer_missing(parameters: Any) -> dict[str, Any]:
    """Removes the counts of missing ids from ``parameters``, and returns them."""
    names = [name for name in parameters if name.startswith("missing_ids.")]
    counts = {name.removeprefix("missing_ids."): parameters[name] for name in names}
    counts = {name: getattr(one, "int64_param", one) for name, one in counts.items()}
    for name in names:
        del parameters[name]
    return counts


def missing_of(name: str, response: bytes) -> tuple[object, dict[str, int]]:
    """Returns (the response without its counts of missing ids, the counts)."""
    if name == "protobuf":
        message = embedding_pb2.EmbedResponse.FromString(response)
        counts = dict(message.missing_ids)
        message.ClearField("missing_ids")
        return message, counts
    if name.startswith("arrow"):
        table = read_table(response)
        metadata = metadata_in(table)
        counts = metadata.pop("missing_ids", {})
        return (metadata, table.to_pydict()), counts
    if name == "infer message":
        answer = open_inference_pb2.ModelInferResponse.FromString(response)
        return answer, infer_missing(answer.parameters)
    if name == "infer streamed":
        streamed = open_inference_pb2.ModelStreamInferResponse.FromString(response)
        return streamed, infer_missing(streamed.infer_response.parameters)
    head, end = json.JSONDecoder().raw_decode(response.decode("latin-1"))
    if name == "json":
        counts = head.pop("missing_ids", {})
    else:
        counts = infer_missing(head.setdefault("parameters", {}))
    return (head, response[end:]), counts


@each_format
def test_missing_id_counts_are_added_without_other_changes(name: str) -> None:
    codec, format_options, read_seq = FORMATS[name]
    options = options_of(format_options)
    for fresh, result in zip(results(options), results(options), strict=True):
        plain, nothing = missing_of(name, encoded(codec, fresh))
        assert nothing == {}
        for missing in MISSING:
            marked = replace(result, missing_ids=missing)
            assert missing_of(name, encoded(codec, marked)) == (plain, missing)
            at_seq = encoded(codec, replace(marked, seq=1234))
            assert missing_of(name, at_seq)[1] == missing
            assert read_seq(at_seq)[1] == 1234
        assert encoded(codec, result) == encoded(codec, fresh)


def test_prediction_reports_missing_ids_in_a_trailer() -> None:
    codec = CODECS.predict
    assert codec.response_headers is not None
    name = b"x-embedding-missing-ids"
    for result in results(None):
        plain = encoded(codec, result)
        marked = replace(result, missing_ids={"user": 1, "a,b=\u00e4\n": 7})
        assert encoded(codec, marked) == plain
        assert codec.response_headers(marked) == [(name, b"user=1,a%2Cb%3D%C3%A4%0A=7")]
    many = {f"feature{i}": 1 for i in range(1000)}
    [(_, value)] = codec.response_headers(replace(result, missing_ids=many))
    assert 4000 < len(value) <= 4096
    *shown, last = value.split(b",")
    assert last == b"*"
    assert shown == [b"feature%d=1" % i for i in range(len(shown))]


def test_prediction_reports_seq_in_a_trailer_only() -> None:
    codec = CODECS.predict
    assert codec.response_headers is not None
    for result in results(None):
        plain = encoded(codec, result)
        assert codec.response_headers(result) == []
        for seq in SEQS:
            at_seq = replace(result, seq=seq)
            assert encoded(codec, at_seq) == plain
            assert codec.response_headers(at_seq) == [(b"x-embedding-seq", b"%d" % seq)]


def entries(model: ModelInfo) -> int:
    """Returns the number of entries in the caches of ``model``."""
    selections = model.key_selections.values()
    return len(model.response_prefix_cache) + sum(
        len(one.response_prefix_cache) for one in selections
    )


@each_format
def test_caches_do_not_grow_with_seqs(name: str) -> None:
    codec, format_options, _ = FORMATS[name]
    model = model_info()
    result = LookupResult(model, np.ones((2, 9), np.float32), output=options_of(format_options))
    encoded(codec, replace(result, seq=0))
    before = entries(model)
    for seq in np.random.default_rng(1).integers(0, 2**63, SEQS_MANY).tolist():
        encoded(codec, replace(result, seq=seq))
    assert entries(model) == before


@each_format
def test_cache_of_prefixes_is_bounded_for_responses_of_many_sizes(name: str) -> None:
    codec, format_options, _ = FORMATS[name]
    model = dataclasses.replace(model_info(), response_prefixes_max=3)
    for size in range(1, 20):
        values = np.ones((size, 9), np.float32)
        encoded(codec, LookupResult(model, values, output=options_of(format_options)))
        assert len(model.response_prefix_cache) <= 3
