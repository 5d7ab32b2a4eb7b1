"""Tests of the version that a request names, in JSON and protobuf."""

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
def test_version_is_appended_to_the_model_name(codec: Codec) -> None:
    assert decoded(codec, "shop", "7").model == "shop@7"
    assert decoded(codec, "shop", "canary").model == "shop@canary"
    assert decoded(codec, "", "canary").model == "@canary"


def test_json_version_may_be_a_number_or_null() -> None:
    assert decoded(JSON, "shop", 7).model == "shop@7"
    assert decoded(JSON, "shop", None).model == "shop"


def test_protobuf_version_is_read_after_bytes_fields() -> None:
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
def test_invalid_or_conflicting_version_is_rejected(
    codec: Codec, model: str, version: str, problem: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(codec, model, version)
    assert (caught.value.message, caught.value.field) == (problem, "version")


@pytest.mark.parametrize("version", [[7], {}, 1.5, True, -1, 2**64, 10**4000])
def test_invalid_json_version_is_rejected(version: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^version is ") as caught:
        decoded(JSON, "shop", version)
    assert caught.value.field == "version"
