"""Tests of large responses: they are encoded in small chunks, each of them quickly."""

import json

import numpy as np
import pytest
from server.codecs import JSON, PROTOBUF
from server.fake_engine import model_info
from server.fake_models import unpooled_info

from embedserve.codec.codec import Codec
from embedserve.codec.json_codec import CHUNK_VALUES, INLINE_VALUES_MAX
from embedserve.codec.protobuf_codec import INLINE_LENGTHS_MAX
from embedserve.lookup_types import LookupResult
from embedserve_proto import embedding_pb2 as pb

POOLED, UNPOOLED = model_info(), unpooled_info()
EXAMPLES = INLINE_VALUES_MAX // 9 + 1
BAGS = INLINE_LENGTHS_MAX // len(UNPOOLED.keys) + 1
CHUNK_BYTES_MAX = 8 * CHUNK_VALUES


def pooled() -> LookupResult:
    values = np.arange(9 * EXAMPLES, dtype=np.float32).reshape(EXAMPLES, 9)
    return LookupResult(POOLED, values[:2000], extra_chunks=[values[2000:]])


def unpooled() -> LookupResult:
    """Returns a result with an id in the last example of each key."""
    keys = len(UNPOOLED.keys)
    lengths = np.zeros((keys, BAGS), np.int32)
    lengths[:, -1] = 1
    values = np.arange(4 * keys, dtype=np.float32).reshape(keys, 4)
    return LookupResult(UNPOOLED, values, {"tag": 1}, lengths)


def encoded(codec: Codec, result: LookupResult) -> bytes:
    """Encodes a large result, and checks that it is encoded as small chunks."""
    assert codec.try_encode_inline(result) is None
    chunks = [bytes(chunk) for chunk in codec.encode(result)]
    assert len(chunks) > 2
    assert max(map(len, chunks)) < CHUNK_BYTES_MAX
    return b"".join(chunks)


def test_large_pooled_values_are_encoded_as_small_json_chunks() -> None:
    result = pooled()
    response = json.loads(encoded(JSON, result))
    assert response["values"] == [*result.values.tolist(), *result.extra_chunks[0].tolist()]


def test_many_lengths_are_encoded_as_small_json_chunks() -> None:
    result = unpooled()
    response = json.loads(encoded(JSON, result))
    assert result.lengths is not None
    assert list(response["lengths"].values()) == result.lengths.tolist()
    assert list(response["values"].values()) == [[row] for row in result.values.tolist()]
    assert response["unknown_ids"] == {"tag": 1}


def test_many_lengths_are_encoded_as_small_protobuf_chunks() -> None:
    result = unpooled()
    response = pb.EmbedResponse.FromString(encoded(PROTOBUF, result))
    assert result.lengths is not None
    assert list(response.lengths) == result.lengths.reshape(-1).tolist()
    assert response.values == result.values.tobytes()
    assert response.batch_size == BAGS
    assert response.unknown_ids == {"tag": 1}


@pytest.mark.parametrize("codec", [JSON, PROTOBUF])
@pytest.mark.parametrize("unknown_ids", [None, {"user": 3}])
def test_small_result_is_encoded_inline_to_the_same_bytes(
    codec: Codec, unknown_ids: dict[str, int] | None
) -> None:
    result = LookupResult(POOLED, np.ones((2, 9), np.float32), unknown_ids)
    inline = codec.try_encode_inline(result)
    assert inline is not None
    assert b"".join(inline[0]) == b"".join(codec.encode(result))
    assert inline[1] == len(b"".join(inline[0]))
