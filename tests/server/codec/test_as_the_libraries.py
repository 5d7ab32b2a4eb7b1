"""Tests that none of our decoders accepts a message that the protobuf library rejects."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from fuzz.mutate import mutated
from google.protobuf.message import DecodeError
from server.open_inference import InferRequest, jagged
from server.predictions import prediction_request

from embedserve.codec import predictor_codec
from embedserve.codec.open_inference.infer_messages import MessageDecoder
from embedserve.codec.protobuf_codec import ProtobufDecoder
from embedserve.config import DEFAULT_LIMITS
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import LookupRequest
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import open_inference_pb2 as oip
from embedserve_proto import predictor_pb2

INPUTS = 100_000
"""Number of mutated messages of each kind."""
SEED = 34
GROUP = b"\xfb\x07\x08\x01\xfc\x07"
Decode = Callable[[bytes], LookupRequest | None]


@dataclass(frozen=True)
class Kind:
    """Valid messages of one kind, the library's class for them, and our decoders."""

    seeds: list[bytes]
    library: type[Any]
    decoders: dict[str, Decode]


def embed_requests() -> list[bytes]:
    ids, lengths = [1, 2, 300, 4, 5, 6], [2, 1, 0, 3]
    packed = pb.EmbedRequest(model="m", keys=["a", "b"], ids=ids, lengths=lengths)
    raw = pb.EmbedRequest(
        model="m",
        keys=["a", "b"],
        ids_bytes=np.array(ids, "<i8").tobytes(),
        lengths_bytes=np.array(lengths, "<i4").tobytes(),
    )
    words = pb.EmbedRequest(
        keys=["a"], lengths=[2], string_keys=["a"], string_ids=["x", "y"], output_keys=["a"]
    )
    return [one.SerializeToString() for one in (packed, raw, words)]


def infer_requests() -> list[bytes]:
    inputs = jagged({"a": [[1], [2, 300]]})
    contents = InferRequest(inputs, request_id="1").message("m", is_raw=False)
    raw = InferRequest(inputs).message("m", is_raw=True)
    return [one.SerializeToString() for one in (contents, raw)]


def predictions() -> list[bytes]:
    bags = {"a": [[1, 2], []], "b": [[3], [4, 5]]}
    weights = {"b": [[0.5], [1.0, 2.0]]}
    made = [prediction_request(["a", "b"], bags), prediction_request(["a", "b"], bags, weights)]
    return [one.SerializeToString() for one in made]


KINDS = {
    "EmbedRequest": Kind(
        embed_requests(),
        pb.EmbedRequest,
        {
            "now": lambda body: ProtobufDecoder().decode_request(body, is_inline=True),
            "whole": lambda body: ProtobufDecoder().decode_request(body),
        },
    ),
    "ModelInferRequest": Kind(
        infer_requests(),
        oip.ModelInferRequest,
        {
            "now": lambda body: MessageDecoder().decode_request(
                body, "", DEFAULT_LIMITS, is_inline=True
            ),
            "whole": lambda body: MessageDecoder().decode_request(body, "", DEFAULT_LIMITS),
        },
    ),
    "PredictionRequest": Kind(
        predictions(),
        predictor_pb2.PredictionRequest,
        {"whole": lambda body: predictor_codec.decode_request(body)},
    ),
}


def fields_of(request: LookupRequest) -> tuple[Any, ...]:
    weights = request.weights
    return (
        request.model,
        request.features,
        request.batch_size,
        request.ids.tobytes(),
        request.lengths.tobytes(),
        None if weights is None else weights.tobytes(),
    )


def decode_or_none(decode: Decode, body: bytes) -> LookupRequest | None:
    try:
        return decode(body)
    except EmbedServeError:
        return None


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_valid_messages_are_accepted(kind: Kind) -> None:
    """Covers messages with a group, which is an unknown field to all decoders."""
    for seed in kind.seeds:
        for body in (seed, seed + GROUP, GROUP + seed):
            kind.library.FromString(body)
            for decode in kind.decoders.values():
                assert decode(body) is not None


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_messages_rejected_by_protobuf_are_rejected_by_every_decoder(kind: Kind) -> None:
    draw = Random(SEED)
    accepted = 0
    for _ in range(INPUTS):
        body = mutated(draw, draw.choice(kind.seeds), kind.seeds)
        found = {name: decode_or_none(decode, body) for name, decode in kind.decoders.items()}
        requests = [one for one in found.values() if one is not None]
        if not requests:
            continue
        accepted += 1
        try:
            kind.library.FromString(body)
        except DecodeError as error:
            raise AssertionError(f"accepted {[*found]}, {error}: {body!r}") from error
        if "now" in found and found["now"] is not None:
            assert found["whole"] is not None, body
        assert len({fields_of(one) for one in requests}) == 1, body
    assert accepted > INPUTS / 100
