"""Fast path for requests with all inputs in shared memory.

Ids and lengths are read directly into their final arrays. A body or message with the same bytes as
an earlier one is not parsed again: a caller with tensors in shared memory repeats the same bytes as
long as its number of ids is the same.

A template has inputs F.ids and then F.lengths of each feature, integers, and no request id. Inputs
that follow one another in a region are a run, which is read by one system call. A template keeps
only the names of regions. Their ownership and size are checked for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from msgspec.structs import replace

from embedserve.codec.open_inference.message_template import TEMPLATE_INPUTS_MAX
from embedserve.codec.open_inference.outputs import ResponseOptions
from embedserve.codec.open_inference.shared_memory_tensors import (
    LocatedTensor,
    read_shared_memory,
    runs,
)
from embedserve.codec.open_inference.tensors import (
    INLINE_TENSOR_BYTES_MAX,
    FeatureSizes,
    InputTensor,
    add_up,
    lookup_request,
    plain_sizes,
)
from embedserve.codec.template_cache import TemplateCache
from embedserve.config import Limits
from embedserve.lookup_types import LookupRequest, OutputOptions, WouldBlockError
from embedserve.shared_memory.region import MemorySlice, Region, Regions

_INT64, _INT32 = np.dtype("<i8"), np.dtype("<i4")
TEMPLATE_BYTES_MAX = 16 << 10
"""Bytes of a JSON or message that locates tensors in shared memory."""
_Run = tuple[str, int, int, slice]
"""A run of contiguous inputs: (name of their region, start, end, positions among the inputs)."""


class SharedMemoryTemplate:
    """Template of a request: location and number of its ids and lengths, and its response options.

    Attributes:
        nbytes: bytes of all ids and lengths.
    """

    def __init__(
        self, sizes: FeatureSizes, located: Sequence[LocatedTensor], limits: Limits
    ) -> None:
        """
        Args:
            sizes: sizes of ``located``, all inputs of the request.
            limits: limits that the sizes were checked against.
        """
        self._features, self._counts, self._batch_size = sizes
        self._limits = limits
        self._runs: list[_Run] = []
        first = 0
        for run in runs(located):
            (_, location), (_, last) = run[0], run[-1]
            which = slice(first, first + len(run))
            self._runs.append(
                (location.region.name, location.offset, last.offset + last.nbytes, which)
            )
            first = which.stop
        ends = [8 * count for count in accumulate(self._counts, initial=0)]
        self._ids_bytes, width = ends[-1], _INT32.itemsize * self._batch_size
        self._slices: list[slice] = []  # each input, in all ids and then all lengths
        for at, (start, end) in enumerate(pairwise(ends)):
            bags = self._ids_bytes + at * width
            self._slices += slice(start, end), slice(bags, bags + width)
        self.nbytes = self._ids_bytes + len(self._counts) * width
        self._body = b""
        self._model = ""
        self._output: OutputOptions | None = None
        self._output_dtype = ""

    @property
    def is_quick(self) -> bool:
        """Whether the inputs are read on the event loop's thread."""
        return self.nbytes <= INLINE_TENSOR_BYTES_MAX

    def has_body(self, body: bytes, limits: Limits) -> bool:
        return body == self._body and limits is self._limits

    def keep(self, body: bytes, like: LookupRequest) -> None:
        """Makes ``read`` return requests like ``like``, the first one with the bytes
        ``body``."""
        self._body, self._model = body, like.model
        self._output, self._output_dtype = like.output, like.output_dtype

    def read_inputs(self, model: str, regions: Regions) -> LookupRequest | None:
        """Returns the request without its response options. Returns None where the lengths do not
        add up, or a region is missing or too small.

        Raises:
            InvalidRequestError: a region no longer exists.
        """
        found: list[Region] = []
        for name, start, end, _ in self._runs:
            location = _location(name, start, end - start, regions)
            if location is None:
                return None
            found.append(location.region)
        whole = np.empty(self.nbytes, np.uint8)
        view = whole.data
        slices = [view[one] for one in self._slices]
        for region, (_, start, _, which) in zip(found, self._runs, strict=True):
            region.read_into(start, slices[which])
        lengths = whole[self._ids_bytes :].view(_INT32)
        if not add_up(lengths, self._batch_size, self._counts):
            return None
        ids = whole[: self._ids_bytes].view(_INT64)
        return LookupRequest(model, self._features, ids, lengths, None, self._batch_size)

    def read(self, regions: Regions, model: str | None) -> LookupRequest | None:
        """Returns the request with its response options, or None as ``read_inputs`` does. ``model``
        None means the model of the first request."""
        output = self._output
        assert output is not None
        options = output.format_options
        assert isinstance(options, ResponseOptions)
        if options.locations is not None:
            # Their regions may since belong to another caller, or be gone.
            locations: dict[str, MemorySlice] = {}
            for name, was in options.locations.items():
                location = _location(was.region.name, was.offset, was.nbytes, regions)
                if location is None:
                    return None
                locations[name] = location
            options = replace(options, locations=locations)
            output = replace(output, format_options=options)
        request = self.read_inputs(self._model if model is None else model, regions)
        if request is not None:
            request.output, request.output_dtype = output, self._output_dtype
        return request


def read_request(
    model: str,
    tensors: Sequence[InputTensor],
    located: Sequence[LocatedTensor],
    regions: Regions | None,
    limits: Limits,
    *,
    is_inline: bool,
) -> tuple[LookupRequest, SharedMemoryTemplate | None]:
    """Returns (the request with ``tensors``, its template or None).

    Args:
        located: the tensors in shared memory, which have no data yet.

    Raises:
        InvalidRequestError: the inputs are invalid, as in lookup_request and read_shared_memory.
        RequestTooLargeError: the inputs are too large, as in these functions.
        WouldBlockError: ``is_inline``, and it would take long.
    """
    template = _template_of(located, limits) if len(located) == len(tensors) else None
    if template is not None and regions is not None:
        if is_inline and not template.is_quick:
            raise WouldBlockError
        request = template.read_inputs(model, regions)
        if request is not None:
            return request, template
    if located:
        read_shared_memory(located, limits, is_inline=is_inline)
    return lookup_request(model, tensors, limits, is_inline=is_inline), None


def _template_of(located: Sequence[LocatedTensor], limits: Limits) -> SharedMemoryTemplate | None:
    """Returns the template of inputs that are all in shared memory. Returns None where their layout
    has no template, or they exceed ``limits``."""
    if not 0 < len(located) <= TEMPLATE_INPUTS_MAX:
        return None
    sizes = plain_sizes(
        [tensor for tensor, _ in located], [location.nbytes for _, location in located], limits
    )
    if sizes is None or not any(sizes[1]):
        return None
    template = SharedMemoryTemplate(sizes, located, limits)
    return template if template.nbytes <= limits.body_bytes_max else None


def _location(name: str, offset: int, nbytes: int, regions: Regions) -> MemorySlice | None:
    region = regions.get(name)
    if region is None or offset + nbytes > region.byte_size:
        return None
    return MemorySlice(region, offset, nbytes)


class SharedMemoryTemplateCache(TemplateCache[SharedMemoryTemplate]):
    """Cache of recent templates."""

    def read(
        self, body: bytes, regions: Regions, limits: Limits, model: str | None, *, is_inline: bool
    ) -> LookupRequest | None:
        """Returns the request in ``body``; None if no template of these bytes and ``limits`` is
        cached, and as SharedMemoryTemplate.read does. Raises WouldBlockError if ``is_inline``, and
        it would take long."""
        for template in self.templates:
            if template.has_body(body, limits):
                if is_inline and not template.is_quick:
                    raise WouldBlockError
                return template.read(regions, model)
        return None

    def cache_template(
        self, body: bytes, template: SharedMemoryTemplate, like: LookupRequest
    ) -> None:
        """Caches ``template`` of ``like``, the first request with the bytes ``body``."""
        if len(body) <= TEMPLATE_BYTES_MAX:
            template.keep(body, like)
            self.add(template, len(body))
