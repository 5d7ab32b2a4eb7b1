"""Template cache for the JSON before binary tensors: bodies that differ only in their numbers.

A caller's bodies name the same inputs and outputs repeatedly. They differ in the sizes of the
inputs and in the tensors behind the JSON. If the template of a body is cached, only these are read.
As in message_template.py, the bytes between two features' sizes of ids are a middle, which is
cached by the batch size.

A template has inputs F.ids and then F.lengths of each feature, integers in binary, and no request
id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from embedserve.codec.open_inference.message_template import (
    BATCH_SIZES_MAX,
    TEMPLATE_INPUTS_MAX,
    VIEWED_BYTES,
)
from embedserve.codec.open_inference.tensors import add_up
from embedserve.codec.template_cache import TemplateCache
from embedserve.config import Limits
from embedserve.lookup_types import LookupRequest

_INT64, _INT32 = np.dtype("<i8"), np.dtype("<i4")
_frombuffer = np.frombuffer
TEMPLATE_BYTES_MAX = 8192
"""Bytes of a JSON that is cached as a template."""
DIGITS_MAX = 9
"""Digits of a size in a JSON that a template matches."""
NUMBERS_PER_FEATURE = 4
"""Numbers in the JSON for each feature, in this order: ids, their bytes, examples, bytes of
lengths."""
_NUMBER = re.compile(rb"(?<=[\[:, ])(?:0|[1-9]\d{0,17})(?=[ ,\]}])")
_MARK = 10**12
TensorSizes = Sequence[tuple[int, int]]
"""(elements, bytes) of each input, in the order of the JSON."""


class JsonTemplate:
    """Template of a JSON: the bytes between its numbers."""

    def __init__(self, between: Sequence[bytes], like: LookupRequest) -> None:
        """
        Args:
            between: the bytes before, between and behind the numbers.
            like: a request of this template. All requests of the template share its features and
                output options.
        """
        self._between = between
        self._features, self._output, self._dtype = like.features, like.output, like.output_dtype
        self._middles: dict[int, tuple[bytes, ...]] = {}

    def read(self, body: bytes, end: int, model: str, limits: Limits) -> LookupRequest | None:
        """Returns the request in ``body``, whose JSON ends at ``end``. Returns None where the body
        has another template or anything is wrong with it."""
        if (
            len(self._features) > limits.request_features_max
            or end > limits.request_text_bytes_max
            or end > limits.request_values_max
            or not body.startswith(self._between[0])
        ):
            return None
        read = self._read_sizes(body, end, limits)
        if read is None:
            return None
        counts, batch_size = read
        return self._read_contents(body, end, model, counts, batch_size)

    def _read_sizes(self, body: bytes, end: int, limits: Limits) -> tuple[list[int], int] | None:
        """Returns (ids of each feature, examples)."""
        between, position = self._between, len(self._between[0])
        find, startswith = body.find, body.startswith
        middles: tuple[bytes, ...] = ()
        counts: list[int] = []
        batch_size = 0
        for at in range(len(self._features)):
            first = between[NUMBERS_PER_FEATURE * at + 1]
            stop = find(first, position, position + DIGITS_MAX + len(first))
            digits = body[position:stop]
            if stop < 0 or not digits.isdigit() or (digits[0] == ord("0") and len(digits) > 1):
                return None
            count = int(digits)
            size = b"%d" % (8 * count)
            position = stop + len(first)
            if not startswith(size, position):
                return None
            position += len(size)
            if not at:
                batch_size = self._batch_size(body, position)
                if not 0 < batch_size <= limits.request_examples_max:
                    return None
                middles = self._middles.get(batch_size) or self._add(batch_size)
            if not startswith(middles[at], position):
                return None
            position += len(middles[at])
            counts.append(count)
        is_whole = position == end and sum(counts) <= limits.request_ids_max
        return (counts, batch_size) if is_whole else None

    def _batch_size(self, body: bytes, position: int) -> int:
        """Returns the number of examples according to the first lengths. The bytes that ``_add``
        makes from it are compared with all of them."""
        start = position + len(self._between[2])
        digits = body[start : start + DIGITS_MAX].partition(self._between[3][:1])[0]
        return int(digits) if digits.isdigit() else 0

    def _add(self, batch_size: int) -> tuple[bytes, ...]:
        """Returns the bytes behind the byte count of each feature's ids, up to the next feature,
        and caches them."""
        examples, size = b"%d" % batch_size, b"%d" % (4 * batch_size)
        between = self._between
        middles = tuple(
            between[at] + examples + between[at + 1] + size + between[at + 2]
            for at in range(2, len(between), NUMBERS_PER_FEATURE)
        )
        if len(self._middles) >= BATCH_SIZES_MAX:
            self._middles.clear()
        self._middles[batch_size] = middles
        return middles

    def _read_contents(
        self, body: bytes, position: int, model: str, counts: list[int], batch_size: int
    ) -> LookupRequest | None:
        view = body if len(body) <= VIEWED_BYTES else memoryview(body)
        ids, lengths = [], []
        lengths_bytes = 4 * batch_size
        for count in counts:
            middle = position + 8 * count
            ids.append(view[position:middle])
            position = middle + lengths_bytes
            lengths.append(view[middle:position])
        if position != len(body):
            return None
        joined = _frombuffer(b"".join(lengths), _INT32)
        if not add_up(joined, batch_size, counts):
            return None
        integers = _frombuffer(b"".join(ids), _INT64)
        request = LookupRequest(model, self._features, integers, joined, None, batch_size)
        request.output, request.output_dtype = self._output, self._dtype
        return request


class JsonTemplateCache(TemplateCache[JsonTemplate]):
    """Cache of the templates of recent bodies."""

    def read(self, body: bytes, end: int, model: str, limits: Limits) -> LookupRequest | None:
        """Returns the request in a body whose template is cached; None for any other body."""
        for template in self.templates:
            request = template.read(body, end, model, limits)
            if request is not None:
                return request
        return None

    def cache_template(
        self, head: bytes, like: LookupRequest, sizes_of: Callable[[bytes], TensorSizes | None]
    ) -> None:
        """Caches the template of ``head``, a JSON without a cached template, if its numbers are
        exactly the sizes of its inputs.

        Args:
            like: the request in that body.
            sizes_of: function that returns the sizes in a JSON with other numbers; None where
                anything else differs, too.
        """
        if len(head) > TEMPLATE_BYTES_MAX:
            return
        between = _NUMBER.split(head)
        numbers = len(between) - 1
        features = len(like.features)
        if numbers != NUMBERS_PER_FEATURE * features or 2 * features > TEMPLATE_INPUTS_MAX:
            return
        # Replaces each number by a unique mark. If a number is part of a name or another value, the
        # marked JSON differs in more than its sizes. The marks' order shows which size is which.
        marks = [b"%d" % (_MARK + at) for at in range(numbers)]
        marked = b"".join(text for pair in zip(between, marks, strict=False) for text in pair)
        expected = [(_MARK + at, _MARK + at + 1) for at in range(0, numbers, 2)]
        if sizes_of(marked + between[-1]) == expected:
            self.add(JsonTemplate(between, like), len(head))
