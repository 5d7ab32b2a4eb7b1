"""Tests that the standard library accepts each accepted JSON body, and reads the same values."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from fuzz.mutate import mutated

from embedserve.codec import json_codec
from embedserve.codec.open_inference.bodies import BodyDecoder
from embedserve.config import DEFAULT_LIMITS
from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.lookup_types import LookupRequest

INPUTS = 100_000
"""Number of mutated bodies of each kind."""
SEED = 34
Values = dict[str, tuple[list[int], list[Any], list[float] | None]]
"""Lengths, ids and weights, by feature."""


@dataclass(frozen=True)
class BodyFormat:
    """Valid bodies of one kind, our decoder, and a function from json's result to values."""

    seeds: list[bytes]
    decode: Callable[[bytes], LookupRequest]
    values: Callable[[Any], Values]


EMBED = [
    b'{"features": {"a": [[1, 2], []], "b": [[300], [4, 5]]}}',
    b'{"features": {"a": [1, 2], "b": []}, "weights": {"a": [0.5, 2]}, "version": 3}',
    '{"features": {"é": [["x", "yy"], []]}, "output_keys": ["é"]}'.encode(),
]
INFER = [
    b'{"inputs": [{"name": "a.ids", "datatype": "INT64", "shape": [3], "data": [1, 2, 300]},'
    b'{"name": "a.lengths", "datatype": "INT32", "shape": [2], "data": [1, 2]}]}',
    '{"id": "é", "unknown": "é", "inputs": [{"name": "b", "shape": [2, 2], "datatype": "INT64",'
    ' "data": [[1, 2], [3, 4]]}]}'.encode(),
]


HEADS = [
    b'{"inputs": [{"name": "a.ids", "datatype": "INT64", "shape": [3], "parameters":'
    b' {"binary_data_size": 24}}, {"name": "a.lengths", "datatype": "INT32", "shape": [2],'
    b' "parameters": {"binary_data_size": 8}}]}',
    '{"unknown": ["é", {"é": 1.5, "e": [null, true, "\\u00e9"]}], "inputs": [{"name": "b",'
    ' "datatype": "INT64", "shape": [2, 2], "parameters":'
    ' {"binary_data_size": 32, "unknown": "é"}}]}'.encode(),
]
TENSOR_BYTES = np.array([1, 2, 300, 1 + (2 << 32)], "<i8").tobytes()
"""Bytes of the tensors behind each JSON head."""


def embed_values(parsed: Any) -> Values:
    weights = parsed.get("weights") or {}
    return {
        name: (
            [len(bag) for bag in _bags(bags)],
            _flat(bags),
            _flat(weights[name]) if name in weights else None,
        )
        for name, bags in parsed["features"].items()
    }


def infer_values(parsed: Any) -> Values:
    found: dict[str, dict[str, Any]] = {}
    for tensor in parsed["inputs"]:
        name, _, part = tensor["name"].rpartition(".")
        is_padded = len(tensor["shape"]) == 2 and part != "weights"
        if is_padded or part not in ("ids", "lengths", "weights"):
            name, part = tensor["name"], "ids"
        found.setdefault(name, {})[part] = tensor
    values = {}
    for name, parts in found.items():
        ids = parts["ids"]
        flat = _flat(ids["data"])
        if "lengths" in parts:
            lengths = _flat(parts["lengths"]["data"])
        else:  # negative ids are padding
            rows, width = ids["shape"]
            of_rows = [flat[at * width : (at + 1) * width] for at in range(rows)]
            lengths = [sum(one >= 0 for one in row) for row in of_rows]
            flat = [one for one in flat if one >= 0]
        weights = _flat(parts["weights"]["data"]) if "weights" in parts else None
        values[name] = (lengths, flat, weights)
    return values


def head_values(parsed: Any) -> Values:
    """Returns the values of tensors whose bytes follow the JSON, in the order of the tensors."""
    rest = TENSOR_BYTES
    for tensor in parsed["inputs"]:
        nbytes = (tensor.get("parameters") or {}).get("binary_data_size")
        if nbytes is not None:
            kind, bits = re.fullmatch("(U?INT)([0-9]+)", tensor["datatype"]).groups()  # type: ignore[union-attr]
            dtype = np.dtype(f"<{'iu'[kind == 'UINT']}{int(bits) // 8}")
            tensor["data"] = np.frombuffer(rest[:nbytes], dtype).tolist()
            rest = rest[nbytes:]
    assert not rest
    return infer_values(parsed)


def _bags(bags: list[Any]) -> list[Any]:
    return bags if bags and isinstance(bags[0], list) else [bags]


def _flat(data: list[Any]) -> list[Any]:
    flat: list[Any] = []
    for one in data:
        flat += _flat(one) if isinstance(one, list) else [one]
    return flat


FORMATS = {
    "embed": BodyFormat(EMBED, lambda body: json_codec.decode_request(body, "m"), embed_values),
    "infer": BodyFormat(
        INFER, lambda body: BodyDecoder().decode_request(body, "m", DEFAULT_LIMITS), infer_values
    ),
    "head": BodyFormat(
        HEADS,
        lambda head: BodyDecoder().decode_request(
            head + TENSOR_BYTES, "m", DEFAULT_LIMITS, len(head)
        ),
        head_values,
    ),
}


def reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def parsed_by_library(body: bytes) -> Any:
    """Parses UTF-8 only, because ``json.loads`` of bytes would guess other encodings."""
    return json.loads(body.decode("utf-8"), parse_constant=reject_constant)


def check_same(request: LookupRequest, values: Values, body: bytes) -> None:
    """Compares the values. String ids are hashed, so only their features and number are
    compared."""
    assert set(request.features) == set(values), body
    lengths = request.lengths.reshape(len(request.features), -1)
    start = 0
    for feature, of_feature in zip(request.features, lengths.tolist(), strict=True):
        expected_lengths, ids, weights = values[feature]
        # A feature without ids among others may be one empty list.
        assert of_feature == expected_lengths or (not ids and not any(of_feature)), body
        end = start + len(ids)
        if feature not in request.string_features:
            assert request.ids[start:end].tolist() == [int(one) for one in ids], body
        if request.weights is not None:
            expected = np.array([1.0] * len(ids) if weights is None else weights, np.float64)
            got = request.weights[start:end]
            assert got.tobytes() == expected.astype(np.float32).tobytes(), body
        else:
            assert weights is None or not ids, body
        start = end
    assert start == request.ids.size, body


@pytest.mark.parametrize("body_format", FORMATS.values(), ids=FORMATS)
def test_valid_bodies_are_accepted(body_format: BodyFormat) -> None:
    for seed in body_format.seeds:
        check_same(body_format.decode(seed), body_format.values(parsed_by_library(seed)), seed)


@pytest.mark.parametrize("body_format", FORMATS.values(), ids=FORMATS)
def test_mutated_bodies_are_rejected_or_read_like_by_json(body_format: BodyFormat) -> None:
    draw = Random(SEED)
    accepted = 0
    for _ in range(INPUTS):
        body = mutated(draw, draw.choice(body_format.seeds), body_format.seeds)
        try:
            request = body_format.decode(body)
        except EmbedServeError:
            continue
        accepted += 1
        try:
            parsed = parsed_by_library(body)
        except ValueError as error:
            raise AssertionError(f"accepted, {error}: {body!r}") from error
        check_same(request, body_format.values(parsed), body)
    assert accepted > INPUTS / 100


TEXTS = b"""{"id": "%b", "unknown": "%b",
 "inputs": [{"name": "user", "shape": [1, 1], "datatype": "INT64", "data": [3]}]}"""
WRONG_TEXTS = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc3\xa9" * 100_000 + b"\x80")


@pytest.mark.parametrize("wrong", WRONG_TEXTS)
def test_invalid_utf8_in_json_is_rejected_in_any_field(wrong: bytes) -> None:
    """Covers invalid bytes in fields that are skipped: json and orjson reject those, too."""
    for texts in ((b"", wrong), (wrong, b"")):
        head = TEXTS % texts
        for json_bytes in (None, len(head)):
            with pytest.raises(InvalidRequestError, match=r"^body is not an inference request: "):
                BodyDecoder().decode_request(head, "m", DEFAULT_LIMITS, json_bytes)


def test_json_with_any_unicode_characters_is_read() -> None:
    head = TEXTS % ("é".encode(), "\N{PILE OF POO}".encode() * 50_000)
    request = BodyDecoder().decode_request(head, "m", DEFAULT_LIMITS, None)
    assert request.ids.tolist() == [3]
