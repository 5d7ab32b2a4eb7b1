"""Decodes the strings of BYTES tensors in binary."""

from __future__ import annotations

from embedserve.codec.open_inference.tensors import InputTensor, wrong
from embedserve.config import Limits
from embedserve.errors import RequestTooLargeError, shortened

STRING_LENGTH_BYTES = 4


def read_strings(tensor: InputTensor, raw: memoryview, limits: Limits) -> list[str]:
    """Returns the strings of a binary BYTES tensor. Each string follows its length, a little-endian
    uint32.

    Raises:
        InvalidRequestError: the strings overrun ``raw``, do not match the shape, or are not UTF-8.
        RequestTooLargeError: the shape has more strings than a request may have values.
    """
    (count,) = tensor.shape if len(tensor.shape) == 1 else (-1,)
    if count < 0:
        raise wrong(tensor, "is not of one dimension")
    if count > limits.request_values_max:
        raise RequestTooLargeError(
            f"{tensor} has {count} strings: {limits.describe('request_values_max')}",
            f"inputs.{shortened(tensor.name)}",
        )
    strings, position, size = [], 0, len(raw)
    for at in range(count):
        start = position + STRING_LENGTH_BYTES
        end = start + int.from_bytes(raw[position:start], "little")
        if start > size or end > size:
            raise wrong(tensor, f"has {size} bytes, which end within string {at} of {count}")
        strings.append(text_of(tensor, at, bytes(raw[start:end])))
        position = end
    if position != size:
        raise wrong(tensor, f"has {size} bytes, but its {count} strings take {position}")
    return strings


def text_of(tensor: InputTensor, at: int, string: bytes) -> str:
    """Decodes ``string``, the one at ``at``. Raises InvalidRequestError where it is not UTF-8."""
    try:
        return string.decode()
    except UnicodeDecodeError as error:
        raise wrong(tensor, f"has a string at {at} that is not UTF-8: {error}") from error
