"""Tests of a router that responds without a lost part and reports what is missing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fanout.local_shards import LocalShards, batch_of, routed
from lookup_cases import unpooled_source
from pooled import collection
from torchrec import PoolingType

from embedserve.errors import MissingPartError
from embedserve.fanout import router_engine
from embedserve.fanout.router_engine import RouterEngine
from embedserve.on_missing import MissingPolicy
from embedserve.shard_client.reply import (
    DEADLINE_EXCEEDED,
    INTERNAL,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Reply,
    lost,
)
from embedserve_proto import embedding_pb2
from embedserve_store import StoreError, publish

PARTS, ROWS, FEATURES = 3, 30, 2
ZEROS, NO_REPLICA = MissingPolicy("zeros"), lost("no replica")
USER_FAILS = MissingPolicy("zeros", {"user": "fail"})
# Rows 0 to 9 are on part 0, 10 to 19 on part 1, 20 to 29 on part 2. The requests have two examples
# and one example. Their ids of user (sums) are [0, 10, 11], [12], [5]. Their ids of item (means)
# are [2, 13, 4], [], [14, 15].
IDS = np.array([0, 10, 11, 12, 5, 2, 13, 4, 14, 15])
LENGTHS = np.array([3, 1, 1, 3, 0, 2], np.int32)
SIZES = (2, 1)
WEIGHTS = np.linspace(0.5, 2, IDS.size, dtype=np.float32)
MISSING = [[3, 1], [0, 2]]
"""Number of ids of part 1, by request and feature."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a store of two tables, each over three parts."""
    torch.manual_seed(0)
    tables = [
        ("user", ROWS, 4, ["user"], PoolingType.SUM),
        ("item", ROWS, 8, ["item"], PoolingType.MEAN),
    ]
    folder = tmp_path_factory.mktemp("store")
    publish(collection(tables), folder, model="m", hosts=PARTS)
    return folder


def values_without(
    engine: RouterEngine, parts: list[int], weights: np.ndarray | None
) -> np.ndarray:
    """Returns the values of the batch without the ids of ``parts``."""
    is_there = ~np.isin(IDS // 10, parts)
    bags = np.repeat(np.arange(LENGTHS.size), LENGTHS)[is_there]
    lengths = np.bincount(bags, minlength=LENGTHS.size).astype(np.int32)
    return engine.lookup(IDS[is_there], lengths, None if weights is None else weights[is_there])


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("parts", [[1], [0, 1], [0, 1, 2]])
def test_result_equals_a_request_without_the_missing_ids(
    shards: LocalShards, parts: list[int], weights: np.ndarray | None
) -> None:
    """Checks that a mean counts only the ids that were found."""
    with routed(shards, on_missing=ZEROS) as engine:
        expected = values_without(engine, parts, weights)
        shards.replies = dict.fromkeys(parts, NO_REPLICA)
        batch, values = batch_of(engine, IDS, LENGTHS, weights, SIZES)
    np.testing.assert_array_equal(values, expected)
    assert not batch.failures
    assert not batch.is_whole
    assert batch.missing_counts is not None
    assert batch.missing_counts.tolist() == (MISSING if parts == [1] else [[4, 3], [1, 2]])
    assert batch.missing_parts == [part for part in parts if part < 2]  # no id is on part 2


def test_complete_batch_reports_no_missing_parts(shards: LocalShards) -> None:
    with routed(shards, on_missing=ZEROS) as engine:
        shards.replies[2] = NO_REPLICA
        batch, _ = batch_of(engine, IDS, LENGTHS, sizes=SIZES)
    assert batch.is_whole
    assert batch.missing_parts == ()


def test_missing_rows_of_a_required_table_fail_the_request(shards: LocalShards) -> None:
    """Checks a request with missing rows of a table that must not be missing: it fails."""
    with routed(shards, on_missing=USER_FAILS) as engine:
        expected = values_without(engine, [1], None)
        shards.replies[1] = NO_REPLICA
        batch, values = batch_of(engine, IDS, LENGTHS, sizes=SIZES)
        [(examples, error)] = batch.failures
        assert examples.tolist() == [0, 1]
        assert type(error) is MissingPartError
        assert np.array_equal(values[2], expected[2])
        assert batch.missing_counts is not None
        assert batch.missing_counts[1].tolist() == MISSING[1]
        assert batch.missing_parts == [1]
        users = batch_of(engine, np.array([10]), np.array([1, 0], np.int32))[0]
        assert users.missing_counts is None
        assert users.missing_parts == ()


def other_version(response: embedding_pb2.EmbedResponse) -> None:
    response.version = 2


@pytest.mark.parametrize(
    "reply",
    [
        Reply(DEADLINE_EXCEEDED),
        Reply(UNAVAILABLE, "HTTP status 429"),  # from a proxy; the part is there
        Reply(RESOURCE_EXHAUSTED, "", b"", 7),
        Reply(RESOURCE_EXHAUSTED, "the message has 9 bytes, the limit is 8"),
        Reply(INTERNAL),
        None,
    ],
)
def test_only_parts_without_a_replica_count_as_missing(
    shards: LocalShards, reply: Reply | None
) -> None:
    """Checks that a late, overloaded or wrong part is an ordinary error."""
    with routed(shards, on_missing=ZEROS) as engine:
        if reply is None:
            shards.changes[1] = other_version
        else:
            shards.replies[1] = reply
        shards.replies[0] = NO_REPLICA
        batch, _ = batch_of(engine, IDS, LENGTHS, sizes=SIZES)
    [(examples, error)] = batch.failures
    assert examples.tolist() == [0, 1, 2]
    assert not isinstance(error, MissingPartError)
    assert batch.missing_counts is not None
    assert batch.missing_counts.tolist() == [[1, 2], [1, 0]]


def test_goldens_fail_if_a_part_is_missing(
    shards: LocalShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_engine, "GOLDENS_RETRY_S_MAX", 0)
    with routed(shards, on_missing=ZEROS) as engine:
        engine.warm_up()
        shards.replies[1] = NO_REPLICA
        with pytest.raises(StoreError, match="part 1 of 3 of 'm' version 1 is not available"):
            engine.warm_up()
        with pytest.raises(MissingPartError):
            engine.lookup(IDS, LENGTHS)


def test_missing_rows_of_an_unpooled_model_are_zeros(tmp_path: Path) -> None:
    publish(unpooled_source(), tmp_path, model="m", hosts=PARTS)
    shards = LocalShards(tmp_path)
    with routed(shards, on_missing=ZEROS) as engine:
        rows = np.array(engine.manifest.rows_per_feature)
        ids = np.stack([np.zeros_like(rows), rows - 1], axis=1).reshape(-1)
        lengths = np.full(rows.size, 2, np.int32)
        expected = engine.lookup(ids, lengths)
        shards.replies[PARTS - 1] = NO_REPLICA
        batch, values = batch_of(engine, ids, lengths)
    assert batch.missing_counts is not None
    assert batch.missing_counts.any()
    is_missing = ~values.any(axis=1)
    assert is_missing.any()
    assert not is_missing.all()
    assert np.array_equal(values[~is_missing], expected[~is_missing])
    keys = [one.feature for one in engine.manifest.columns]
    assert is_missing.sum() == batch.missing_counts[0, keys].sum()
