"""Tests of replicas: which replica gets a batch, and that all return the same results."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event

import numpy as np
import pytest
from engine.conftest import Publish
from reference import check_concurrent_lookups, sample, to_kjt

from embedserve.engine.engine import Engine
from embedserve.engine.replicas import Replicas
from embedserve.engine.restore import restore
from embedserve_store import StoreError

WAIT_S = 60.0


class BlockingReplica:
    """A replica that blocks a lookup until the test allows a result: the ids, or an error."""

    def __init__(self, started: SimpleQueue["BlockingReplica"]) -> None:
        self.may_return = Event()
        self.failure: Exception | None = None
        self._started = started

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        self._started.put(self)
        assert self.may_return.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        return ids


class BlockingReplicas:
    """Replicas that block their lookups; each batch runs in a thread."""

    def __init__(self, replicas: int, threads: ThreadPoolExecutor) -> None:
        self._started: SimpleQueue[BlockingReplica] = SimpleQueue()
        self.each = [BlockingReplica(self._started) for _ in range(replicas)]
        self._replicas = Replicas(one.lookup for one in self.each)
        self._threads = threads

    def submit(self, ids: int) -> tuple[int, Future[np.ndarray]]:
        """Submits one bag of ``ids`` ids; returns the chosen replica's number and the result."""
        bag = np.zeros(ids, np.int64), np.full(1, ids, np.int32)
        pending = self._threads.submit(self._replicas.lookup, *bag)
        return self.each.index(self._started.get(timeout=WAIT_S)), pending

    def unblock_all(self) -> None:
        for one in self.each:
            one.may_return.set()


def test_batch_goes_to_the_replica_with_least_work_in_flight() -> None:
    with ThreadPoolExecutor(8) as threads:
        blocking = BlockingReplicas(3, threads)
        try:
            first = [blocking.submit(ids) for ids in (100, 10, 50)]
            assert [chosen for chosen, _ in first] == [0, 1, 2]
            # next to 10, 41 and 50
            assert [blocking.submit(ids)[0] for ids in (30, 20, 9)] == [1, 1, 2]
            blocking.each[0].may_return.set()
            first[0][1].result(WAIT_S)
            assert blocking.submit(1)[0] == 0
        finally:
            blocking.unblock_all()


def test_failed_batches_do_not_count_as_in_flight() -> None:
    with ThreadPoolExecutor(2) as threads:
        blocking = BlockingReplicas(2, threads)
        blocking.each[0].failure = ValueError("no")
        chosen, failed = blocking.submit(100)
        assert chosen == 0
        blocking.unblock_all()
        with pytest.raises(ValueError, match="no"):
            failed.result(WAIT_S)
        blocking.each[0].failure = None
        chosen_replicas = []
        for _ in range(4):
            chosen, result = blocking.submit(1)
            result.result(WAIT_S)
            chosen_replicas.append(chosen)
        assert chosen_replicas == [1, 0, 1, 0]


class TwoReplicaEngine(Engine):
    """An engine whose second replica adds ``error`` to its results."""

    error = 0.0

    def each(self) -> list[Callable[..., np.ndarray]]:
        return [self.lookup, lambda *batch: self.lookup(*batch) + self.error]


def test_goldens_of_every_replica_are_compared_at_start_and_later(published: Publish) -> None:
    version = published(sharding="table_wise")
    engine = TwoReplicaEngine(version, version.plan, "cpu", [restore(version).compiled])
    engine.warm_up()
    engine.check()
    engine.error = 1.0
    with pytest.raises(StoreError, match="goldens are answered otherwise now"):
        engine.check()
    with pytest.raises(StoreError, match="are not the published ones"):
        engine.warm_up()


def test_concurrent_lookups_on_replicas_equal_those_of_one_engine(published: Publish) -> None:
    version = published(dtype="int8", sharding="table_wise")
    engines = [restore(version), restore(version)]
    replicas = Replicas(engine.lookup for engine in engines)
    features = version.manifest.features
    requests = [to_kjt(sample(version, size), features) for size in (1, 7, 100)]
    random = np.random.default_rng(1)
    rounded = [
        (ids, lengths, random.normal(size=ids.size).astype(np.float32), True)
        for ids, lengths in requests
    ]
    check_concurrent_lookups(replicas.lookup, [*requests, *rounded], 120, engines[0].lookup)
