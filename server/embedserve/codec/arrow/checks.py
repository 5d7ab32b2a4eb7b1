"""Checks of the buffers and values of a column, and the errors that name them."""

from __future__ import annotations

import numpy as np

from embedserve.codec.arrow.columns import Column
from embedserve.codec.arrow.stream import RecordBatch
from embedserve.codec.json_errors import weights_mismatch
from embedserve.errors import InvalidRequestError
from embedserve.request_checks import find_bag

INT64_MAX = 2**63 - 1


def check_buffer(batch: RecordBatch, column: Column, buffer: int, nbytes: int) -> None:
    """Raises InvalidRequestError unless the buffer numbered ``buffer`` has ``nbytes`` or more."""
    if batch.sizes[buffer] < nbytes:
        raise column.wrong(
            f"has a buffer of {batch.sizes[buffer]} bytes where its {batch.rows} bags need {nbytes}"
        )


def check_sign(batch: RecordBatch, column: Column, ids: np.ndarray, lengths: np.ndarray) -> None:
    """Raises InvalidRequestError if one of ``ids``, uint64, is larger than an int64."""
    is_large = ids > INT64_MAX
    if is_large.any():
        at = int(is_large.argmax())
        raise wrong_value(batch, column, lengths, at, f"is {ids[at]}: ids are at most 2^63 - 1")


def check_weights(
    batch: RecordBatch, column: Column, lengths: np.ndarray, of_ids: np.ndarray
) -> None:
    """Raises InvalidRequestError unless the bags of weights have the lengths ``of_ids``."""
    is_other = lengths != of_ids
    if is_other.any():
        at = int(is_other.argmax())
        raise column.wrong(weights_mismatch(lengths[at], of_ids[at]), batch.first + at)


def wrong_offsets(column: Column, offsets: np.ndarray, count: int) -> InvalidRequestError:
    """Returns the error for the first invalid offset."""
    is_wrong = (offsets < 0) | (offsets > count)
    is_wrong[1:] |= offsets[1:] < offsets[:-1]
    at = int(is_wrong.argmax())
    return column.wrong(
        f"has {offsets[at]} for offset {at}: offsets rise from 0 to the {count} values at most"
    )


def wrong_value(
    batch: RecordBatch, column: Column, lengths: np.ndarray, position: int, problem: str
) -> InvalidRequestError:
    """Returns the error for the value at ``position`` among the values of a batch's bags with
    ``lengths``."""
    bag, place = find_bag(lengths, position)
    return column.wrong(problem, batch.first + bag, place)
