"""Runs batches on GPUs: one copy to the device, the lookup, one copy back.

A batch is sent in one buffer of pinned memory. Its result is final when it is copied back: means
are divided and values rounded to float16 on the GPU. Each batch has its own streams from the first
copy to the last, so that one batch is copied while another is looked up. The calling thread waits
for the last copy without holding the GIL.

With the CPU as the device the same code runs without streams and pinned memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch

from embedserve.engine.compile import Lookup
from embedserve_store.format.manifest import Manifest


class DeviceBatches:
    """Looks up batches on the device that holds the rows. Thread-safe.

    torch caches pinned memory, in powers of two. It reuses memory for a batch of a similar size
    once no copy and no array uses it. The cache therefore grows to the batches and results that are
    held at the same time.
    """

    def __init__(
        self,
        manifest: Manifest,
        device: torch.device,
        ranks: int,
        lookup: Lookup,
        weighted_lookup: Lookup | None = None,
    ) -> None:
        """
        Args:
            device: device on which batches enter and results leave.
            ranks: number of GPUs, from ``device`` on, that need streams.
            lookup, weighted_lookup: lookups that take offsets in place of lengths, and ids as
                int32.
        """
        self._manifest = manifest
        self._device = device
        self._ranks = ranks
        self._lookup = lookup
        self._weighted_lookup = weighted_lookup
        self._is_pinned = device.type == "cuda"
        self._idle: list[list[torch.cuda.Stream]] = []
        self._has_means = any(column.table.pooling == "mean" for column in manifest.columns)

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        """Looks up one batch, as Engine.lookup does; the result is float16 if ``as_float16``."""
        packed = self._packed(ids, lengths, weights)
        with torch.inference_mode(), self._streams() as stream:
            result = self.on_device(packed, lengths.size, ids.size, as_float16=as_float16)
            values = self._empty(result.shape, result.dtype)
            values.copy_(result, non_blocking=True)
            if stream is not None:
                stream.synchronize()
        array: np.ndarray = values.numpy()
        return array

    def on_device(
        self, packed: torch.Tensor, bags: int, ids: int, *, as_float16: bool
    ) -> torch.Tensor:
        """Returns the result of a batch on the device, where it may not be ready yet.

        Args:
            packed: the batch as returned by _packed, in this host's memory.
            bags, ids: numbers of bags and ids in the batch.
        """
        words = packed.to(self._device, non_blocking=True)
        offsets, numbers = words[: bags + 1], words[bags + 1 : bags + 1 + ids]
        if words.numel() == bags + 1 + ids:
            result = self._lookup(numbers, offsets, None)
        else:
            assert self._weighted_lookup is not None
            weights = words[bags + 1 + ids :].view(torch.float32)
            result = self._weighted_lookup(numbers, offsets, weights)
        if self._has_means:
            result.div_(self._divisors(offsets))
        return result.to(torch.float16) if as_float16 else result

    def _packed(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None
    ) -> torch.Tensor:
        """Returns int32 words in pinned memory: the offsets of the bags (one more than bags), the
        ids, and the bits of the float32 weights if there are any."""
        first_id = lengths.size + 1
        has_weights = weights is not None
        packed = self._empty((first_id + ids.size * (1 + has_weights),), torch.int32)
        words = packed.numpy()
        words[0] = 0
        lengths.cumsum(dtype=np.int32, out=words[1:first_id])
        words[first_id : first_id + ids.size] = ids
        if has_weights:
            words[first_id + ids.size :].view(np.float32)[:] = weights
        return packed

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned)

    def _divisors(self, offsets: torch.Tensor) -> torch.Tensor:
        """Returns float32 [B, sum(dims)], the divisors of the result: the number of ids of each
        example, at least 1, for a mean; 1 for a sum."""
        counts = offsets.diff().view(len(self._manifest.features), -1)
        with_ones = torch.nn.functional.pad(counts.clamp(min=1), (0, 0, 0, 1), value=1)
        return with_ones.to(torch.float32).t().index_select(1, self._feature_of_column)

    @cached_property
    def _feature_of_column(self) -> torch.Tensor:
        """int64 [sum(dims)] on the device: the feature of each column; for a sum the number of
        features, which selects the divisor 1."""
        manifest = self._manifest
        features = [
            column.feature if column.table.pooling == "mean" else len(manifest.features)
            for column in manifest.columns
        ]
        dims = np.array([column.end - column.start for column in manifest.columns])
        return torch.from_numpy(np.repeat(np.array(features), dims)).to(self._device)

    @contextlib.contextmanager
    def _streams(self) -> Iterator[torch.cuda.Stream | None]:
        """Runs this thread's work for each GPU in a stream that no other thread uses, within its
        block. Yields the stream of the device where results leave, or None on the CPU."""
        if self._device.type != "cuda":
            yield None
            return
        try:
            streams = self._idle.pop()  # the last one used, so that its freed memory is reused
        except IndexError:
            streams = self._new_streams()
        try:
            with contextlib.ExitStack() as stack:
                for stream in reversed(streams):  # so that the main device is current in the end
                    stack.enter_context(torch.cuda.stream(stream))
                yield streams[0]
        finally:
            self._idle.append(streams)

    def _new_streams(self) -> list[torch.cuda.Stream]:
        """Returns a new stream for each GPU. It waits for the work on the default stream, which
        builds the model."""
        streams = []
        first = self._device.index
        for gpu in range(first, first + self._ranks):
            streams.append(torch.cuda.Stream(gpu))
            streams[-1].wait_stream(torch.cuda.default_stream(gpu))
        return streams
