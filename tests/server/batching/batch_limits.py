"""Limits under which a batch runs in the event loop or in a thread, and bags for a request."""

from __future__ import annotations

from server.fake_engine import FEATURES, Bags

from embedserve.batching.batcher import BAG_BYTES
from embedserve.config import Limits

INLINE = Limits()
IN_THREAD = Limits(inline_bytes_max=0)
ONE_BYTES = 52 + len(FEATURES) * BAG_BYTES
"""Bytes of the work of a request with one id: it reads a row of at most 4 dims, and writes 9."""
USER: Bags = {"user": [[1, 2, 3]]}
