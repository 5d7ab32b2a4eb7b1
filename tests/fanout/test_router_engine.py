"""Tests of a router's engine: results equal those of whole tables, failed examples are named."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fanout.conftest import Published
from fanout.local_shards import LocalShards, batch_of, routed
from lookup_cases import check_lookup
from pooled import collection
from torchrec import PoolingType

from embedserve.call_trace import CallTrace
from embedserve.errors import (
    DeadlineExceededError,
    EmbedServeError,
    EngineError,
    NotReadyError,
    OverloadedError,
    RequestTooLargeError,
)
from embedserve.fanout import router_engine
from embedserve.fanout.router_engine import RouterEngine
from embedserve.shard_client.reply import (
    DEADLINE_EXCEEDED,
    INTERNAL,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Reply,
)
from embedserve.tracing.trace_context import TraceContext
from embedserve_proto import embedding_pb2
from embedserve_store import ModelStore, StoreError, publish
from embedserve_store.errors import UnopenedError
from embedserve_store.format.table_spec import DTYPES

PARTS = 3


@pytest.mark.parametrize("parts", [2, 4, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_pooled", [True, False])
def test_results_equal_those_of_whole_tables(
    published: Published, dtype: str, is_pooled: bool, parts: int
) -> None:
    store = published(is_pooled, parts, dtype)
    with routed(LocalShards(store)) as engine:
        engine.warm_up()
        check_lookup(engine.lookup, engine, ModelStore(store).load("m"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Makes a store of a table of 30 rows over three parts."""
    torch.manual_seed(0)
    tables = [("user", 30, 4, ["user"], PoolingType.SUM)]
    publish(collection(tables), tmp_path, model="m", hosts=PARTS)
    return tmp_path


@pytest.fixture
def engine(shards: LocalShards) -> Iterator[RouterEngine]:
    with routed(shards) as routing:
        yield routing


IDS, LENGTHS = np.array([0, 10, 11, 20]), np.array([1, 2, 1], np.int32)
"""(ids, lengths) of three examples; example n has ids only of part n."""


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (Reply(UNAVAILABLE, "10.0.0.7:80 is gone"), NotReadyError, "part 1 of 3 of 'm' version 1"),
        (Reply(RESOURCE_EXHAUSTED, "", b"", 7), OverloadedError, "is overloaded"),
        (
            Reply(RESOURCE_EXHAUSTED, "the message has 9 bytes, the limit is 8"),
            RequestTooLargeError,
            "rejects a request of this size: the message has 9 bytes, the limit is 8. Send fewer",
        ),
        (Reply(DEADLINE_EXCEEDED), DeadlineExceededError, "has not answered in time"),
        (Reply(INTERNAL, "a secret"), EngineError, "the server's log says why"),
    ],
)
def test_failing_part_fails_only_its_examples(
    engine: RouterEngine,
    shards: LocalShards,
    reply: Reply,
    kind: type[EmbedServeError],
    words: str,
) -> None:
    expected = engine.lookup(IDS, LENGTHS)
    shards.replies[1] = reply
    batch, values = batch_of(engine, IDS, LENGTHS)
    [(examples, error)] = batch.failures
    assert examples.tolist() == [1]
    assert type(error) is kind
    assert words in error.message
    assert "10.0.0.7" not in error.message
    assert "secret" not in error.message
    assert error.retry_after_s == max(reply.retry_after_s, kind.retry_after_s)
    assert np.array_equal(values[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("is_pooled", [True, False])
def test_partial_values_are_rounded_to_the_partial_dtype(
    published: Published, is_pooled: bool
) -> None:
    store = published(is_pooled, PARTS, "float32")
    answers = {}
    for dtype in ("float32", "float16"):
        shards = LocalShards(store)
        with routed(shards, dtype) as engine:
            engine.warm_up()
            assert set(shards.dtypes) == {"float32"}  # goldens are compared without rounding
            shards.dtypes.clear()
            features = len(engine.manifest.features)
            rows = np.repeat(engine.manifest.rows_per_feature, 6)
            ids = np.arange(rows.size) * 7 % rows
            _, answers[dtype] = batch_of(engine, ids, np.full(2 * features, 3, np.int32))
            assert set(shards.dtypes) == {dtype}
    exact, rounded = answers["float32"], answers["float16"]
    assert exact.dtype == rounded.dtype == np.float32
    assert 0 < np.abs(exact - rounded).max() < 2.0**-9 * np.abs(exact).max()


class StoppingShards(LocalShards):
    """Shards whose event loop ends during a lookup, as in a server after its last batch."""

    def call_part(self, *_: object) -> None:
        assert self.loop is not None
        self.loop.stop()


def test_lookup_fails_when_the_event_loop_ends(store: Path) -> None:
    with (
        routed(StoppingShards(store)) as engine,
        pytest.raises(EngineError, match="the event loop has ended"),
    ):
        engine.lookup(IDS, LENGTHS)


def test_failing_part_keeps_rounded_values_of_other_parts(store: Path, shards: LocalShards) -> None:
    with routed(shards, "float16") as engine:
        expected = engine.lookup(IDS, LENGTHS)
        shards.replies[1] = Reply(UNAVAILABLE)
        batch, values = batch_of(engine, IDS, LENGTHS)
    [(examples, _)] = batch.failures
    assert examples.tolist() == [1]
    np.testing.assert_allclose(values[[0, 2]], expected[[0, 2]], rtol=2.0**-11)


def other_version(response: embedding_pb2.EmbedResponse) -> None:
    response.version = 2


def other_model(response: embedding_pb2.EmbedResponse) -> None:
    response.model = "n"


def fewer_values(response: embedding_pb2.EmbedResponse) -> None:
    response.values = response.values[:-4]


def other_dtype(response: embedding_pb2.EmbedResponse) -> None:
    response.output_dtype = embedding_pb2.FLOAT16


@pytest.mark.parametrize("change", [other_version, other_model, fewer_values, other_dtype])
def test_invalid_part_response_fails_its_examples(
    engine: RouterEngine,
    shards: LocalShards,
    change: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shards.changes[2] = change  # type: ignore[assignment]
    batch, _ = batch_of(engine, IDS, LENGTHS)
    [(examples, error)] = batch.failures
    assert examples.tolist() == [2]
    assert type(error) is EngineError
    assert re.search("part 2 of 3 of 'm' version 1 fails: [A-Z]+: ", caplog.text)


def test_calls_to_all_parts_are_traced_for_the_batch(
    engine: RouterEngine, shards: LocalShards
) -> None:
    calls = CallTrace(TraceContext("a" * 32, "", True))
    batch_of(engine, IDS, LENGTHS, calls=calls)
    assert shards.traced == dict.fromkeys(range(PARTS), calls)
    batch_of(engine, IDS, LENGTHS)
    assert shards.traced == dict.fromkeys(range(PARTS))


def test_parts_without_ids_are_not_called(engine: RouterEngine, shards: LocalShards) -> None:
    engine.lookup(np.array([12, 13]), np.array([2, 0], np.int32))
    assert shards.called_parts == [1]
    zeros = engine.lookup(np.empty(0, np.int64), np.zeros(2, np.int32))
    assert shards.called_parts == [1]
    assert np.array_equal(zeros, np.zeros((2, 4), np.float32))


def test_warm_up_rejects_rows_that_do_not_match_goldens(
    engine: RouterEngine, shards: LocalShards
) -> None:
    engine.warm_up()

    def add(response: embedding_pb2.EmbedResponse) -> None:
        values = np.frombuffer(response.values, np.float32) + np.float32(1)
        response.values = values.tobytes()

    shards.changes[0] = add
    with pytest.raises(StoreError, match="are not the published ones") as raised:
        engine.warm_up()
    assert type(raised.value) is StoreError


def test_failed_golden_lookups_are_retried(
    engine: RouterEngine, shards: LocalShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            shards.replies.clear()

    monkeypatch.setattr(router_engine, "sleep", pause)
    shards.replies[0] = Reply(RESOURCE_EXHAUSTED, "", b"", 7)
    shards.replies[1] = Reply(DEADLINE_EXCEEDED)
    engine.warm_up()
    assert pauses == [router_engine.GOLDENS_PAUSE_S] * 2


@pytest.mark.parametrize(
    ("reply", "retry_s", "words"),
    [
        (Reply(UNAVAILABLE), 0.0, "part 0 of 3 of 'm' version 1 is not available"),
        (Reply(RESOURCE_EXHAUSTED, "9 bytes, the limit is 8"), 600.0, "a request of this size"),
    ],
)
def test_golden_lookups_are_not_retried_forever(
    engine: RouterEngine,
    shards: LocalShards,
    monkeypatch: pytest.MonkeyPatch,
    reply: Reply,
    retry_s: float,
    words: str,
) -> None:
    monkeypatch.setattr(router_engine, "GOLDENS_RETRY_S_MAX", retry_s)
    shards.replies[0] = reply
    with pytest.raises(UnopenedError, match=f"its goldens were not answered: .*{words}"):
        engine.warm_up()
    assert shards.called_parts.count(0) == 1
