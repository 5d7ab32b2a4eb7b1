"""Tests of how calls end: every client accepts the trailers, whatever the error message is."""

from urllib.parse import unquote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve.errors import InvalidRequestError, OverloadedError
from embedserve.wire.grpc.grpc_framing import GrpcCallError
from embedserve.wire.grpc.statuses import CODES, MESSAGE_BYTES_MAX, error_trailers


def test_status_codes_equal_those_of_grpc() -> None:
    assert {name: grpc.StatusCode[name].value[0] for name in CODES} == CODES


def test_error_trailers_have_code_message_field_and_retry_after() -> None:
    assert error_trailers(InvalidRequestError("50% off", "features.user")) == [
        (b"grpc-status", b"3"),
        (b"grpc-message", b"50%25 off"),
        (b"embedserve-field", b"features.user"),
    ]
    assert error_trailers(OverloadedError("full")) == [
        (b"grpc-status", b"8"),
        (b"grpc-message", b"full"),
        (b"retry-after", b"1"),
    ]
    assert error_trailers(InvalidRequestError("")) == [(b"grpc-status", b"3")]


@pytest.mark.parametrize(("code", "is_listed"), [("UNIMPLEMENTED", True), ("INTERNAL", False)])
def test_unimplemented_error_lists_the_accepted_encodings(code: str, is_listed: bool) -> None:
    trailers = dict(error_trailers(GrpcCallError(code, "said")))
    assert trailers[b"grpc-status"] == b"%d" % CODES[code]
    assert (trailers.get(b"grpc-accept-encoding") == b"identity,deflate,gzip") == is_listed


@given(st.text(max_size=3000), st.text(max_size=3000))
def test_error_trailers_are_printable_bounded_and_keep_the_starts_of_message_and_field(
    message: str, field: str
) -> None:
    try:
        (message + field).encode()
    except UnicodeEncodeError:
        return
    trailers = dict(error_trailers(InvalidRequestError(message, field)))
    assert sum(len(name) + len(value) + 32 for name, value in trailers.items()) < 8192
    assert all(0x20 <= byte <= 0x7E for value in trailers.values() for byte in value)
    assert field.lstrip(" ").startswith(unquote(trailers.get(b"embedserve-field", b"").decode()))
    decoded = unquote(trailers.get(b"grpc-message", b"").decode())
    assert message.startswith(decoded)
    if len(message.encode()) <= MESSAGE_BYTES_MAX:
        assert decoded == message
    else:
        assert len(decoded.encode()) > MESSAGE_BYTES_MAX - 4
