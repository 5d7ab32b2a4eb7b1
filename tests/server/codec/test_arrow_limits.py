"""Tests of the limits of Arrow streams: examples, ids, columns, names, strings and batches."""

import json

import pyarrow as pa
import pytest
from server.arrow_streams import columns_of, stream_of
from server.codec.crafted_arrow import ARROW, LIMITS, CraftedStream

from embedserve.codec.arrow.stream import END
from embedserve.config import Limits
from embedserve.errors import RequestTooLargeError


def stream_of_batches(count: int) -> bytes:
    return stream_of(columns_of({"user": [[1]] * count}), rows=1)


OVER_LIMIT = {
    "examples that are declared": (CraftedStream(rows=2**62).stream(), "--request-examples-max"),
    "examples of several batches": (stream_of_batches(101), "--request-examples-max"),
    "ids": (stream_of(columns_of({"user": [[1] * 1001]})), "--request-ids-max"),
    "lists of fixed size": (
        stream_of(columns_of({"user": [[1] * 501] * 2}, layout=lambda of: pa.list_(of, 501))),
        "--request-ids-max",
    ),
    "columns": (
        stream_of(columns_of({f"f{i}": [[1]] for i in range(21)})),
        "--request-features-max",
    ),
    "columns, and their weights": (
        stream_of(columns_of({f"f{i}": [[1]] for i in range(41)})),
        "--request-features-max",
    ),
    "keys": (
        stream_of(columns_of({"user": [[1]]}), options={"output_keys": json.dumps(["a"] * 21)}),
        "--request-features-max",
    ),
    "a name": (stream_of(columns_of({"x" * 1025: [[1]]})), "has a name of 1025 bytes"),
    "metadata": (
        stream_of(
            columns_of({"a": [[1]]}).replace_schema_metadata({str(at): "" for at in range(65)})
        ),
        "metadata has 65 entries",
    ),
    "metadata of ours": (
        stream_of(columns_of({"a": [[1]]}), options={"version": "1" * 65_537}),
        "has 65537 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER_LIMIT)
def test_streams_over_a_limit_are_rejected(name: str) -> None:
    body, reason = OVER_LIMIT[name]
    with pytest.raises(RequestTooLargeError) as caught:
        ARROW.decode_request(body, "", LIMITS)
    assert reason in caught.value.message


def test_bags_without_bytes_count_toward_the_limit() -> None:
    """Covers lists of zero values, and nulls: a few bytes can be very many bags."""
    lists = columns_of({f"f{i}": [[]] * 100 for i in range(20)}, layout=lambda of: pa.list_(of, 0))
    nulls = pa.table({f"f{i}": pa.nulls(100) for i in range(20)})
    for table in (lists, nulls):
        body = stream_of(table)
        assert ARROW.decode_request(body).lengths.size == 2000
        ids = 2000 - len(body) // 4
        with pytest.raises(RequestTooLargeError, match=r"2000 bags, .* the limit is 1999"):
            ARROW.decode_request(body, "", Limits(request_ids_max=ids - 1))
    ids = 2000 - len(stream_of(lists)) // 4
    assert ARROW.decode_request(stream_of(lists), "", Limits(request_ids_max=ids))


def test_strings_and_text_bytes_over_the_limit_are_rejected() -> None:
    body = stream_of(pa.table({"user": [["ab"] * 11]}))
    assert ARROW.decode_request(body).ids.size == 11
    for limits, reason in (
        (Limits(request_values_max=10), "11 strings, the limit is 10"),
        (Limits(request_text_bytes_max=21), "22 bytes of strings, the limit is 21"),
    ):
        with pytest.raises(RequestTooLargeError, match=reason):
            ARROW.decode_request(body, "", limits)


def test_too_many_record_batches_are_rejected() -> None:
    of_one = columns_of({"user": [[1]]})
    body, start = stream_of(of_one), of_one.schema.serialize().size
    batch = body[start : -len(END)]
    assert ARROW.decode_request(body[:start] + 252 * batch).batch_size == 252
    with pytest.raises(RequestTooLargeError, match=r"has 253 record batches .* limit is 252"):
        ARROW.decode_request(body[:start] + 1000 * batch)
