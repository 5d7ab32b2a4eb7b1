"""Trains sharded tables over gloo processes and pushes the changed rows to the store.

    python training_pushes.py WORLD_SIZE STORE OUT_FOLDER [thread]

All ranks publish version 1 of "m". For each push rank 0 writes ``SEQ.pt`` into OUT_FOLDER, with the
whole tables as they were in training at the push. Before the last push rank 0 undoes all deltas.
With "thread" a push writes nothing before the training steps after it are done.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from store.deltas.conftest import WRITE_S_MAX, failing_writes, gate_writes
from store.deltas.tracked_training import batch, gathered, ranker, stepper
from torchrec import KeyedJaggedTensor

from embedserve_store import DeltaWriter, RevertedError, StoreError, publish_sharded, undo_deltas

STEPS = (3, 1, 0, 2)
"""Number of training steps before each push."""


def main(rank: int, store: str, out: str, mode: str) -> None:
    dmp = ranker()
    step = stepper(dmp, rank)
    step()
    publish_sharded(dmp, store, model="m")
    dist.barrier()
    with DeltaWriter(store, model="m", module=dmp) as writer:
        pushes = Pushes(writer, is_threaded=mode == "thread")
        for at, steps in enumerate(STEPS):
            for _ in range(steps):
                step()
            pushes.finish()
            if at == 1:
                fail_once(writer, pushes)
            if at == len(STEPS) - 1:
                undo_all(pushes, store, rank, step)
            pushes.push(at, bags(at), dmp)
        pushes.finish()
        if rank == 0:
            for seq, whole in pushes.ended.items():
                torch.save(whole, Path(out) / f"{seq}.pt")
    dist.barrier()


class Pushes:
    """Pushes in the caller, or in a thread whose first write waits for ``finish``.

    Attributes:
        ended: whole tables at each successful push, by seq.
    """

    def __init__(self, writer: DeltaWriter, *, is_threaded: bool) -> None:
        self.writer, self._is_threaded = writer, is_threaded
        self.ended: dict[int, dict[str, torch.Tensor]] = {}
        self._gate = gate_writes(writer)
        self._in_flight: tuple[Future[int], dict[str, torch.Tensor]] | None = None

    def push(self, at: int, goldens: KeyedJaggedTensor | None, dmp: torch.nn.Module) -> None:
        if self._is_threaded:
            self._gate.clear()
            future = self.writer.push(step=at, goldens=goldens, wait=False)
            self._in_flight = future, gathered(dmp)  # training's collectives
            assert not future.done()
        else:
            self._gate.set()
            self.ended[self.writer.push(step=at, goldens=goldens)] = gathered(dmp)

    def finish(self) -> None:
        self._gate.set()
        self.writer.wait()
        if self._in_flight is not None:
            future, whole = self._in_flight
            self.ended[future.result()] = whole
            self._in_flight = None

    def fail(self, kind: type[StoreError], reason: str) -> None:
        """Pushes, and checks that all ranks raise."""
        if not self._is_threaded:
            with pytest.raises(kind, match=reason):
                self.writer.push()
            return
        future = self.writer.push(wait=False)
        with pytest.raises(kind, match=reason):
            future.result(WRITE_S_MAX)  # raises on this rank only
        with pytest.raises(kind, match=reason):
            self.writer.wait()
        self.writer.wait()


def bags(seed: int) -> KeyedJaggedTensor | None:
    """Returns the bags of the goldens on rank 0, and None on the other ranks. The last push has
    none."""
    if seed == len(STEPS) - 1:
        return None
    return batch(np.random.default_rng(seed)) if dist.get_rank() == 0 else None


def undo_all(pushes: Pushes, store: str, rank: int, step: Callable[[], None]) -> None:
    """Checks that all ranks get the error of an undo. The next push has each rank's undone rows,
    and the rows of the push that could not begin."""
    if rank == 0:
        undo_deltas(store, "m", to=0, why="CTR fell")
    dist.barrier()
    pushes.fail(RevertedError, "CTR fell")
    step()
    with pytest.raises(RevertedError, match="CTR fell"):
        pushes.writer.push()
    pushes.writer.resume()


def fail_once(writer: DeltaWriter, pushes: Pushes) -> None:
    """Makes a push fail at its manifest: all ranks raise, and the next push has its rows."""
    with failing_writes(writer, ".json"):
        pushes.fail(StoreError, "the store is away")


if __name__ == "__main__":
    size, *folders = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    run_ranks(size, main, *folders, "".join(sys.argv[4:]))
