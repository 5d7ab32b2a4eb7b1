"""Limits under which a batch runs in the event loop or in a thread, bags for a request, and a
batcher whose engine is busy."""

from server.conftest import MakeBatcher
from server.fake_engine import FEATURES, Bags, FakeEngine
from server.pending_requests import Waiting, submit
from server.waiting import until

from embedserve.batching.batcher import BAG_BYTES, Batcher
from embedserve.config import Limits

INLINE = Limits()
IN_THREAD = Limits(inline_bytes_max=0)
ONE_BYTES = 52 + len(FEATURES) * BAG_BYTES
"""Bytes of the work of a request with one id: it reads a row of at most 4 dims, and writes 9."""
USER: Bags = {"user": [[1, 2, 3]]}


async def busy_batcher(
    engine: FakeEngine, make_batcher: MakeBatcher, limits: Limits, bags: Bags = USER
) -> tuple[Batcher, Waiting]:
    """Returns a batcher whose engine is held in the lookup of a request, and that request."""
    batcher = make_batcher(limits)
    engine.hold()
    running = submit(batcher, engine.request(bags))
    await until(lambda: engine.lookups)
    return batcher, running
