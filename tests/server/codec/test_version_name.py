"""Tests of the version that a request names, in JSON and protobuf."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.codecs import JSON, PROTOBUF

from embedserve.codec.codec import Codec
from embedserve.config import DEFAULT_LIMITS
from embedserve.errors import InvalidRequestError
from embedserve.lookup_types import LookupRequest
from embedserve_proto import embedding_pb2 as pb


def decoded(codec: Codec, model: str, version: Any) -> LookupRequest:
    if codec is JSON:
        body = json.dumps({"features": {"user": [[1]]}, "version": version}).encode()
    else:
        message = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1], version=version)
        body = message.SerializeToString()
    return codec.decode(body, model, DEFAULT_LIMITS)


@pytest.mark.parametrize("codec", [JSON, PROTOBUF])
def test_it_goes_behind_the_model(codec: Codec) -> None:
    assert decoded(codec, "shop", "7").model == "shop@7"
    assert decoded(codec, "shop", "canary").model == "shop@canary"
    assert decoded(codec, "", "canary").model == "@canary"


def test_json_takes_a_number_and_null() -> None:
    assert decoded(JSON, "shop", 7).model == "shop@7"
    assert decoded(JSON, "shop", None).model == "shop"


def test_protobuf_takes_it_behind_numbers_given_as_bytes() -> None:
    """Covers messages that match a template, and messages that do not."""
    ids, lengths = b"\1" + bytes(7), b"\1" + bytes(3)
    plain = pb.EmbedRequest(model="shop", keys=["user"], ids_bytes=ids, lengths_bytes=lengths)
    for version in ("", "7", "", "canary"):
        plain.version = version
        request = PROTOBUF.decode(plain.SerializeToString(), "", DEFAULT_LIMITS)
        assert request.model == (f"shop@{version}" if version else "shop")


@pytest.mark.parametrize("codec", [JSON, PROTOBUF])
@pytest.mark.parametrize(
    ("model", "version", "problem"),
    [
        ("", "a@b", "version is 'a@b': expected a number or an alias"),
        ("shop@7", "8", "version is '8', but the model 'shop@7' says which already"),
        ("", "x" * 65, f"version is '{'x' * 64}': expected a number or an alias"),
    ],
)
def test_what_can_be_none_is_refused(codec: Codec, model: str, version: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(codec, model, version)
    assert (caught.value.message, caught.value.field) == (problem, "version")


@pytest.mark.parametrize("version", [[7], {}, 1.5, True, -1, 2**64, 10**4000])
def test_other_json_is_refused(version: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^version is ") as caught:
        decoded(JSON, "shop", version)
    assert caught.value.field == "version"
