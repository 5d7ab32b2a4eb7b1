"""Tests that accepted Arrow streams are read like Arrow's own library reads them."""

import re
from random import Random

import pyarrow as pa
from fuzz.mutate import mutated
from server.arrow_streams import columns_of, stream_of

from embedserve.codec.arrow.requests import ArrowDecoder
from embedserve.config import DEFAULT_LIMITS
from embedserve.errors import EmbedServeError

INPUTS = 100_000
"""Number of mutated streams."""
SEED = 34
NOT_VERIFIED = re.compile(
    "Invalid flatbuffers message|Unexpected null field|Buffer .* did not start on 8-byte aligned"
)
"""Errors of Arrow's library for which our decoder rejects nothing, as docs/threat-model.md lists.

The library verifies all metadata of a message and the alignment of buffers. Our decoder checks the
metadata that it reads, and copies values from any address.
"""


def streams() -> list[bytes]:
    bags = {"a": [[1, 2], []], "b": [[3], [4, 5]]}
    weighted = columns_of(bags, {"a": [[0.5, 1.0], []]})
    words = columns_of({"a": [["x", "yy"], []]})
    return [
        stream_of(columns_of(bags)),
        stream_of(weighted, rows=1),
        stream_of(words, options={"version": "3"}),
    ]


def test_accepted_mutated_streams_are_read_like_pyarrow_reads_them() -> None:
    draw, seeds, decoder = Random(SEED), streams(), ArrowDecoder()
    both = not_verified = 0
    for _ in range(INPUTS):
        body = mutated(draw, draw.choice(seeds), seeds)
        try:
            request = decoder.decode_request(body, "m", DEFAULT_LIMITS)
        except EmbedServeError:
            continue
        try:
            with pa.ipc.open_stream(body) as reader:
                table = reader.read_all()
            table.validate(full=True)
        except (pa.ArrowInvalid, OSError) as error:
            if NOT_VERIFIED.match(str(error)) is None:
                raise AssertionError(f"accepted, {error}: {body!r}") from error
            not_verified += 1
            continue
        both += 1
        assert request.batch_size == table.num_rows, body
        lengths = request.lengths.reshape(len(request.features), -1).tolist()
        start = 0
        for feature, of_feature in zip(request.features, lengths, strict=True):
            bags = [bag or [] for bag in table.column(feature).to_pylist()]
            assert of_feature == [len(bag) for bag in bags], body
            ids = [one for bag in bags for one in bag]
            if feature not in request.string_features:
                assert request.ids[start : start + len(ids)].tolist() == ids, body
            start += len(ids)
    assert both > INPUTS / 100, (both, not_verified)
