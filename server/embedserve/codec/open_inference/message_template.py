"""Template cache for ModelInferRequest: messages that differ only in their numbers.

A caller's requests name the same model, inputs and outputs repeatedly. They differ in the request
id, the sizes of the inputs and their contents. If the template of a message is cached, only these
are read. A template has inputs F.ids and then F.lengths of each feature, integers in
raw_input_contents. Its messages have these bytes; those in capitals differ:

    head ID  stem COUNT  stem BATCH  stem COUNT  stem BATCH … tail  IDS LENGTHS  IDS LENGTHS …

A stem is the bytes of an input up to its size. The batch size is the same in all inputs of lengths.
All bytes between two counts of ids, a middle, therefore depend on it and on the width of the next
count alone, and are cached by the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedserve.codec.open_inference.outputs import set_output
from embedserve.codec.open_inference.tensors import add_up
from embedserve.codec.protobuf_fields import field_tag, read_varint, varint
from embedserve.codec.template_cache import TemplateCache
from embedserve.config import Limits
from embedserve.lookup_types import LookupRequest, OutputOptions
from embedserve_proto import open_inference_pb2 as pb

_Request = pb.ModelInferRequest
_Input = pb.ModelInferRequest.InferInputTensor
_INT64, _INT32 = np.dtype("<i8"), np.dtype("<i4")
_frombuffer = np.frombuffer
TEMPLATE_BYTES_MAX, TEMPLATE_INPUTS_MAX = 4096, 128
"""Bytes of a template of messages that is cached, and inputs of a request of any template."""
BATCH_SIZES_MAX = 32
"""Batch sizes for which a template caches the bytes between its counts of ids. All templates
together then take a few megabytes at most."""
WIDTHS = 3
"""Bytes of the largest varint count of ids that a template reads, about two million."""
INLINE_JAGGED_BYTES_MAX = 4 << 20
"""Bytes of a request whose jagged ids the event loop's thread copies and adds up, in about two
milliseconds."""
VIEWED_BYTES = 64 << 10
"""Bytes of a message that is sliced by copying. A larger message is sliced by views, so that it is
not copied twice."""
ENCODED_INPUTS_TAG = bytes([field_tag(_Request, "inputs")])
REQUEST_ID_TAG = field_tag(_Request, "id")
ENCODED_RAW_TAG = bytes([field_tag(_Request, "raw_input_contents")])
ENCODED_SHAPE_TAG = bytes([field_tag(_Input, "shape")])
SMALL_COUNTS = 256
RAW_STARTS = tuple(ENCODED_RAW_TAG + varint(8 * count) for count in range(SMALL_COUNTS))
"""Bytes before the raw contents of small counts of ids, by the count."""
_Stems = tuple[bytes, ...]
"""Bytes of an input up to its only dimension, by the bytes of that dimension's varint, from 1."""
_Middles = tuple[tuple[_Stems, ...], bytes, bytes]
"""Bytes for a batch size: those between the counts of ids, by the width of the next count; those
behind the last count; those before the raw contents of lengths."""


class MessageTemplate:
    """Template of a message: the bytes between its numbers.

    Attributes:
        head: bytes before the request id.
        nbytes: bytes that the template keeps, those cached for batch sizes not counted.
    """

    def __init__(
        self, model: tuple[str, str], named: str, features: Sequence[str], outputs: Sequence[str]
    ) -> None:
        """
        Args:
            model: (model_name, model_version).
            named: the model's name in the LookupRequest.
            features: the features, in the order of the inputs.
            outputs: names of the requested outputs.
        """
        name, version = model
        self.head = _Request(model_name=name, model_version=version).SerializeToString()
        self._named, self._features, self._outputs = named, tuple(features), tuple(outputs)
        self._ids = [_stems(f"{one}.ids", "INT64") for one in features]
        self._lengths = [_stems(f"{one}.lengths", "INT32") for one in features]
        requested = [_Request.InferRequestedOutputTensor(name=one) for one in outputs]
        self._tail = _Request(outputs=requested).SerializeToString()
        self._middles: dict[int, _Middles] = {}
        self._checked_limits: Limits | None = None
        self._output: OutputOptions | None = None  # of a request without an id
        self.nbytes = sum(len(one[0]) for one in (*self._ids, *self._lengths))
        self.nbytes += len(self.head) + len(self._tail)

    def read(self, body: bytes, limits: Limits) -> LookupRequest | None:
        """Returns the request in ``body``, which begins with the head. Returns None where the body
        has another template or anything is wrong with it."""
        if limits is not self._checked_limits and not self._is_allowed(limits):
            return None
        position, request_id = len(self.head), ""
        try:
            if body[position] == REQUEST_ID_TAG:
                size, start = read_varint(body, position + 1)
                position = start + size
                request_id = body[start:position].decode()
            read = self._read_sizes(body, position, limits)
            if read is None:
                return None
            counts, batch_size, position, lengths_start = read
            request = self._read_contents(body, position, counts, batch_size, lengths_start)
        except (IndexError, ValueError):
            return None
        if request is None:
            return None
        if self._output is None or request_id:
            names = self._outputs
            set_output(request, request_id, names, (True,) * len(names), True, limits)
            self._output = None if request_id else request.output
        else:
            request.output = self._output
        return request

    def _is_allowed(self, limits: Limits) -> bool:
        """Returns whether messages of this template are within ``limits``, except for their
        numbers."""
        text_bytes_max = min(limits.request_text_bytes_max, limits.request_values_max)
        if len(self._features) > limits.request_features_max or self.nbytes > text_bytes_max:
            return False
        self._checked_limits = limits
        return True

    def _read_sizes(
        self, body: bytes, position: int, limits: Limits
    ) -> tuple[list[int], int, int, bytes] | None:
        """Returns (ids of each feature, examples, start of the contents, the bytes before the
        contents of lengths), or None like ``read``."""
        count, position = _count(body, position, self._ids[0])
        at = position + len(self._lengths[0][0])
        batch_size, _ = read_varint(body, at)
        if not 0 < batch_size <= limits.request_examples_max:
            return None
        middles = self._middles.get(batch_size)
        if middles is None:
            middles = self._add(batch_size)
        between, last, lengths_start = middles
        counts = [count]
        for stems in between:
            stem = stems[0]
            after = position + len(stem)
            count = body[after] if body.startswith(stem, position) else 0x80
            if count < 0x80:
                position = after + 1
            else:
                count, position = _count(body, position, stems)
            counts.append(count)
        if min(counts) < 0 or sum(counts) > limits.request_ids_max:
            return None
        if not body.startswith(last, position):
            return None
        return counts, batch_size, position + len(last), lengths_start

    def _add(self, batch_size: int) -> _Middles:
        size = varint(batch_size)
        lengths = [one[len(size) - 1] + size for one in self._lengths]
        between = tuple(
            tuple(before + stem for stem in stems)
            for before, stems in zip(lengths, self._ids[1:], strict=False)
        )
        middles = between, lengths[-1] + self._tail, ENCODED_RAW_TAG + varint(4 * batch_size)
        if len(self._middles) >= BATCH_SIZES_MAX:
            self._middles.clear()
        self._middles[batch_size] = middles
        return middles

    def _read_contents(
        self, body: bytes, position: int, counts: list[int], batch_size: int, lengths_start: bytes
    ) -> LookupRequest | None:
        view = body if len(body) <= VIEWED_BYTES else memoryview(body)
        ids, lengths = [], []
        lengths_bytes, start_bytes = 4 * batch_size, len(lengths_start)
        startswith = body.startswith
        for count in counts:
            start = (
                RAW_STARTS[count] if count < SMALL_COUNTS else ENCODED_RAW_TAG + varint(8 * count)
            )
            first = position + len(start)
            end = first + 8 * count
            if not (startswith(start, position) and startswith(lengths_start, end)):
                return None
            bags = end + start_bytes
            position = bags + lengths_bytes
            ids.append(view[first:end])
            lengths.append(view[bags:position])
        if position != len(body):
            return None
        joined = _frombuffer(b"".join(lengths), _INT32)
        if not add_up(joined, batch_size, counts):
            return None
        integers = _frombuffer(b"".join(ids), _INT64)
        return LookupRequest(self._named, self._features, integers, joined, None, batch_size)


def _stems(name: str, datatype: str) -> _Stems:
    """Returns the bytes of a one-dimensional input up to its size, for each width of that size in
    bytes."""
    described = _Input(name=name, datatype=datatype).SerializeToString()
    stems = []
    for width in range(1, WIDTHS + 1):
        shape = ENCODED_SHAPE_TAG + bytes([width])
        size = len(described) + len(shape) + width
        stems.append(ENCODED_INPUTS_TAG + varint(size) + described + shape)
    return tuple(stems)


def _count(body: bytes, position: int, stems: _Stems) -> tuple[int, int]:
    """Returns (size of the input at ``position``, its end). The size is -1 for any other input."""
    for width, stem in enumerate(stems, 1):
        if body.startswith(stem, position):
            start = position + len(stem)
            count, end = read_varint(body, start)
            return (count if end == start + width else -1), end
    return -1, position


class MessageTemplateCache(TemplateCache[MessageTemplate]):
    """Cache of the templates of recent messages."""

    def read(self, body: bytes, limits: Limits) -> LookupRequest | None:
        """Returns the request in a message whose template is cached; None for any other message."""
        for template in self.templates:
            if body.startswith(template.head):
                request = template.read(body, limits)
                if request is not None:
                    return request
        return None

    def cache_template(self, body: bytes, template: MessageTemplate, limits: Limits) -> None:
        """Caches ``template`` if ``body``, a message without a cached template, matches it. A
        serializer may write the same message in other bytes."""
        if template.nbytes <= TEMPLATE_BYTES_MAX and template.read(body, limits) is not None:
            self.add(template, template.nbytes)
