"""Requests whose inputs all lie in shared memory: their ids are read into their place at once, and
those that are told by the same bytes as one before are not parsed again.

A caller that has its tensors in memory asks with the same bytes over and over, as long as its ids
are as many. A form has F.ids and then F.lengths of each feature, integers, and no id of the
request. Of regions it has the names: whose they are, and how large, is looked up for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from embedserve.codec.open_inference.answers import ResponseOptions as AnswerForm
from embedserve.codec.open_inference.message_template import FORM_INPUTS_MAX
from embedserve.codec.open_inference.shared_memory_tensors import (
    NOW_BYTES_MAX,
    PlacedTensor,
    read_placed,
    runs,
)
from embedserve.codec.open_inference.template_cache import TemplateCache
from embedserve.codec.open_inference.tensors import (
    InputTensor,
    Sizes,
    add_up,
    lookup_request,
    plain_sizes,
)
from embedserve.config import Limits
from embedserve.lookup import LookupRequest, OutputOptions
from embedserve.shared_memory.memory_slice import MemorySlice
from embedserve.shared_memory.region import Region, Regions

_INT64, _INT32 = np.dtype("<i8"), np.dtype("<i4")
FORM_BYTES_MAX = 16 << 10
"""Of the JSON or message that tells where tensors lie."""
_Run = tuple[str, int, int, slice]
"""Inputs one behind the other: the name of their region, where they begin and end there, which."""


class SharedMemoryTemplate:
    """Where ids and lengths lie, how many, and what is asked for."""

    def __init__(self, sizes: Sizes, placed: Sequence[PlacedTensor], limits: Limits) -> None:
        """
        Args:
            sizes: of ``placed``, all inputs.
            limits: that they keep to.
        """
        self._features, self._counts, self._batch_size = sizes
        self._limits = limits
        self._runs: list[_Run] = []
        first = 0
        for run in runs(placed):
            (_, place), (_, last) = run[0], run[-1]
            which = slice(first, first + len(run))
            self._runs.append((place.region.name, place.offset, last.offset + last.nbytes, which))
            first = which.stop
        ends = [8 * count for count in accumulate(self._counts, initial=0)]
        self._ids_bytes, width = ends[-1], _INT32.itemsize * self._batch_size
        self._slices: list[slice] = []  # of all ids and then all lengths, those of each input
        for at, (start, end) in enumerate(pairwise(ends)):
            bags = self._ids_bytes + at * width
            self._slices += slice(start, end), slice(bags, bags + width)
        self.nbytes = self._ids_bytes + len(self._counts) * width
        self._told = b""
        self._model = ""
        self._output: OutputOptions | None = None
        self._output_dtype = ""

    @property
    def is_quick(self) -> bool:
        """Whether it is read on the event loop's thread."""
        return self.nbytes <= NOW_BYTES_MAX

    def is_told_by(self, body: bytes, limits: Limits) -> bool:
        return body == self._told and limits is self._limits

    def keep(self, told: bytes, like: LookupRequest) -> None:
        """Has ``read_known`` answer requests that are ``told`` so as ``like``, the first."""
        self._told, self._model = told, like.model
        self._output, self._output_dtype = like.output, like.output_dtype

    def read(self, model: str, regions: Regions) -> LookupRequest | None:
        """The request, without what is asked for; None where lengths do not add up, or the regions
        are not those.

        Raises:
            InvalidRequestError: a region is gone.
        """
        found: list[Region] = []
        for name, start, end, _ in self._runs:
            place = _place(name, start, end - start, regions)
            if place is None:
                return None
            found.append(place.region)
        whole = np.empty(self.nbytes, np.uint8)
        view = whole.data
        parts = [view[one] for one in self._slices]
        for region, (_, start, _, which) in zip(found, self._runs, strict=True):
            region.read_into(start, parts[which])
        lengths = whole[self._ids_bytes :].view(_INT32)
        if not add_up(lengths, self._batch_size, self._counts):
            return None
        ids = whole[: self._ids_bytes].view(_INT64)
        return LookupRequest(model, self._features, ids, lengths, None, self._batch_size)

    def read_known(self, regions: Regions, model: str | None = None) -> LookupRequest | None:
        """As ``read``, with what is asked for; ``model`` None: that of the first."""
        output = self._output
        assert output is not None
        form = output.form
        assert isinstance(form, AnswerForm)
        if form.places is not None:  # whose regions are another's, or gone
            places: dict[str, MemorySlice] = {}
            for name, was in form.places.items():
                place = _place(was.region.name, was.offset, was.nbytes, regions)
                if place is None:
                    return None
                places[name] = place
            output = replace(output, form=replace(form, places=places))
        request = self.read(self._model if model is None else model, regions)
        if request is not None:
            request.output, request.output_dtype = output, self._output_dtype
        return request


def read_request(
    model: str,
    tensors: Sequence[InputTensor],
    placed: Sequence[PlacedTensor],
    regions: Regions | None,
    limits: Limits,
    *,
    is_now: bool,
) -> tuple[LookupRequest, SharedMemoryTemplate | None] | None:
    """The request of ``tensors``, those of which that are ``placed`` have no data yet, and its form
    if it has one; None where it is to be made now, and would take long.

    Raises:
        InvalidRequestError: as lookup_request and read_placed.
        RequestTooLargeError: likewise.
    """
    form = _form_of(placed, limits) if len(placed) == len(tensors) else None
    if form is not None and regions is not None:
        if is_now and not form.is_quick:
            return None
        request = form.read(model, regions)
        if request is not None:
            return request, form
    if placed and not read_placed(placed, limits, is_now=is_now):
        return None
    return lookup_request(model, tensors, limits), None


def _form_of(placed: Sequence[PlacedTensor], limits: Limits) -> SharedMemoryTemplate | None:
    """Of inputs that all lie in shared memory; None where it is none, or they are not within
    ``limits``."""
    if not 0 < len(placed) <= FORM_INPUTS_MAX:
        return None
    sizes = plain_sizes(
        [tensor for tensor, _ in placed], [place.nbytes for _, place in placed], limits
    )
    if sizes is None or not any(sizes[1]):
        return None
    form = SharedMemoryTemplate(sizes, placed, limits)
    return form if form.nbytes <= limits.body_bytes_max else None


def _place(name: str, offset: int, nbytes: int, regions: Regions) -> MemorySlice | None:
    region = regions.get(name)
    if region is None or offset + nbytes > region.byte_size:
        return None
    return MemorySlice(region, offset, nbytes)


class SharedMemoryTemplateCache(TemplateCache[SharedMemoryTemplate]):
    """Those met last."""

    def find(self, told: bytes, limits: Limits) -> SharedMemoryTemplate | None:
        """The one of requests that are ``told`` so, within these ``limits``."""
        for form in self:
            if form.is_told_by(told, limits):
                return form
        return None

    def remember(self, told: bytes, form: SharedMemoryTemplate, like: LookupRequest) -> None:
        """``like`` is the first request that is ``told`` so, of this form."""
        if len(told) <= FORM_BYTES_MAX:
            form.keep(told, like)
            self.add(form)


forms = SharedMemoryTemplateCache()
