"""Tests of inference requests as JSON, with and without binary tensors behind it."""

from __future__ import annotations

import pytest

from embedserve.codec.open_inference.bodies import BodyDecoder
from embedserve.config import DEFAULT_LIMITS
from embedserve.errors import InvalidRequestError

HEAD = b"""{"id": "%b", "unknown": "%b",
 "inputs": [{"name": "user", "shape": [1, 1], "datatype": "INT64", "data": [3]}]}"""
WRONG = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc3\xa9" * 100_000 + b"\x80")


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_utf8_in_json_is_rejected_in_any_field(wrong: bytes) -> None:
    """Covers invalid bytes in fields that are skipped: json and orjson reject those, too."""
    for texts in ((b"", wrong), (wrong, b"")):
        head = HEAD % texts
        for json_bytes in (None, len(head)):
            with pytest.raises(InvalidRequestError, match=r"^body is not an inference request: "):
                BodyDecoder().decode_request(head, "m", DEFAULT_LIMITS, json_bytes)


def test_json_with_any_unicode_characters_is_read() -> None:
    head = HEAD % ("é".encode(), "\N{PILE OF POO}".encode() * 50_000)
    request = BodyDecoder().decode_request(head, "m", DEFAULT_LIMITS, None)
    assert request.ids.tolist() == [3]
