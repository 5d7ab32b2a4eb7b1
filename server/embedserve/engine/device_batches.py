"""Batches on their way to GPUs and back: one copy in, the lookup, one copy out.

A batch goes there in one buffer of pinned memory, and comes back as what its callers are told:
means are divided and values rounded to float16 where they are. Each batch has streams of its own
from the first copy to the last, so that one may be copied while another is looked up; the thread
that asks waits for the last of them without the interpreter's lock.

With the CPU as the device the same is done without streams and pinned memory. No line of this has
run on a GPU yet.
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
    """Looks batches up where the rows are; from several threads at once.

    torch keeps pinned memory, in powers of two, for the next batch of about that size, once no
    copy and no array uses it: there is as much of it as batches and answers that are held at once.
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
            device: where batches enter and answers leave.
            ranks: of how many GPUs, from that one on, streams are needed.
            lookup, weighted_lookup: take offsets in place of lengths, and ids as int32.
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
        in_half: bool = False,
    ) -> np.ndarray:
        """As Engine.lookup; float16 where ``in_half``."""
        packed = self._packed(ids, lengths, weights)
        with torch.inference_mode(), self._streams() as stream:
            answer = self.on_device(packed, lengths.size, ids.size, in_half=in_half)
            values = self._empty(answer.shape, answer.dtype)
            values.copy_(answer, non_blocking=True)
            if stream is not None:
                stream.synchronize()
        array: np.ndarray = values.numpy()
        return array

    def on_device(
        self, packed: torch.Tensor, bags: int, ids: int, *, in_half: bool
    ) -> torch.Tensor:
        """The answer to a batch, on the device, where it may not be ready yet.

        Args:
            packed: as _packed gives it, in this host's memory.
            bags, ids: how many it has.
        """
        words = packed.to(self._device, non_blocking=True)
        offsets, numbers = words[: bags + 1], words[bags + 1 : bags + 1 + ids]
        if words.numel() == bags + 1 + ids:
            answer = self._lookup(numbers, offsets, None)
        else:
            assert self._weighted_lookup is not None
            weights = words[bags + 1 + ids :].view(torch.float32)
            answer = self._weighted_lookup(numbers, offsets, weights)
        if self._has_means:
            answer.div_(self._divisors(offsets))
        return answer.to(torch.float16) if in_half else answer

    def _packed(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None
    ) -> torch.Tensor:
        """int32 words, in pinned memory: where each bag begins and the last one ends, the ids, and
        the float32 weights where there are some."""
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
        """float32 [B, sum(dims)]: of a column that is a mean, how many ids each example has."""
        counts = offsets.diff().view(len(self._manifest.features), -1)
        with_ones = torch.nn.functional.pad(counts.clamp(min=1), (0, 0, 0, 1), value=1)
        return with_ones.to(torch.float32).t().index_select(1, self._feature_of_column)

    @cached_property
    def _feature_of_column(self) -> torch.Tensor:
        """int64 [sum(dims)], on the device; of a column that is a sum one past the last."""
        manifest = self._manifest
        features = [
            column.feature if column.table.pooling == "mean" else len(manifest.features)
            for column in manifest.columns
        ]
        dims = np.array([column.end - column.start for column in manifest.columns])
        return torch.from_numpy(np.repeat(np.array(features), dims)).to(self._device)

    @contextlib.contextmanager
    def _streams(self) -> Iterator[torch.cuda.Stream | None]:
        """Within, this thread's work for each GPU goes into a stream that nobody else uses; that of
        the device where answers leave, None on the CPU."""
        if self._device.type != "cuda":
            yield None
            return
        try:
            streams = self._idle.pop()  # the last one used: memory that it freed is its own
        except IndexError:
            streams = self._new_streams()
        try:
            with contextlib.ExitStack() as stack:
                for stream in reversed(streams):  # the device is the current one then
                    stack.enter_context(torch.cuda.stream(stream))
                yield streams[0]
        finally:
            self._idle.append(streams)

    def _new_streams(self) -> list[torch.cuda.Stream]:
        """Of each GPU one, which begins once what was done there to build the model is done."""
        streams = []
        first = self._device.index
        for gpu in range(first, first + self._ranks):
            streams.append(torch.cuda.Stream(gpu))
            streams[-1].wait_stream(torch.cuda.default_stream(gpu))
        return streams
