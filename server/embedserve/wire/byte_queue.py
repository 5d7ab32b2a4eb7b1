"""Reassembly buffer: received chunks of bytes, joined once when they are taken."""

from __future__ import annotations

SMALL_BYTES = 512
"""Bytes below which adjacent chunks are joined, because the overhead of an object exceeds them."""


class ByteQueue:
    """A FIFO queue of bytes, stored as chunks.

    Attributes:
        nbytes: bytes in the queue.
    """

    __slots__ = ("_chunks", "_start", "nbytes")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._start = 0  # of the remaining bytes in the first chunk
        self.nbytes = 0

    def append(self, chunk: bytes) -> None:
        chunks = self._chunks
        self.nbytes += len(chunk)
        if len(chunk) < SMALL_BYTES and chunks and len(chunks[-1]) < SMALL_BYTES:
            chunks[-1] += chunk
        else:
            chunks.append(chunk)

    def front(self, nbytes: int) -> bytes:
        """Returns the first ``nbytes`` without taking them; the queue must hold as many."""
        first, end = self._chunks[0], self._start + nbytes
        if end > len(first):
            first, end = self._join(), nbytes
        return first[self._start : end]

    def take(self, nbytes: int, skipped: int = 0) -> bytes:
        """Takes the first ``nbytes``; the queue must hold as many. Omits the first ``skipped``."""
        if not nbytes:
            return b""
        first, end = self._chunks[0], self._start + nbytes
        if end > len(first):
            if nbytes == self.nbytes and not self._start:
                return self._take_all(skipped)
            first, end = self._join(), nbytes
        taken = first[self._start + skipped : end]
        self._start = end
        self.nbytes -= nbytes
        if end == len(first):
            del self._chunks[0]
            self._start = 0
        return taken

    def take_all(self) -> bytes:
        return self.take(self.nbytes)

    def _take_all(self, skipped: int) -> bytes:
        """Takes all bytes of several chunks with a single copy."""
        chunks, self._chunks = self._chunks, []
        self.nbytes = 0
        if skipped > len(chunks[0]):
            return b"".join(chunks)[skipped:]
        return b"".join((memoryview(chunks[0])[skipped:], *chunks[1:]))

    def _join(self) -> bytes:
        first, *rest = self._chunks
        whole = b"".join((memoryview(first)[self._start :], *rest))
        self._chunks, self._start = [whole], 0
        return whole
