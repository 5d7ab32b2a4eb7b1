"""Tests of attached weights: kernels read the mapped file; only rows outside of it are copied."""

import logging

import pytest
import torch
from engine.conftest import SHARDING, Publish
from torchrec.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection

from embedserve.engine.attach_weights import as_tensor, attach_weights, share_rows
from embedserve.engine.sharded import shard_without_rows
from embedserve_store import ModelVersion


def sharded_on_cpu(
    version: ModelVersion, *, is_weighted: bool = False
) -> ShardedQuantEmbeddingBagCollection:
    return shard_without_rows(version, version.plan, "cpu", is_weighted=is_weighted).module


def test_only_column_shards_are_copied(
    published: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    version = published(dtype="int8", sharding=SHARDING, world_size=2)
    with caplog.at_level(logging.INFO, "embedserve"):
        sharded = sharded_on_cpu(version)
        attach_weights(sharded, version, "cpu")
    mapped = as_tensor(version.tables.data)
    copied = {}
    for kernel, config in sharded.tbes_configs().items():
        if kernel.weights_host.data_ptr() != mapped.data_ptr():
            names = {table.name for table in config.embedding_tables}
            copied[kernel.weights_host.data_ptr()] = names, kernel.weights_host.numel()
    assert {name for names, _ in copied.values() for name in names} == {"movie", "genre"}
    total_bytes = sum(count for _, count in copied.values())
    assert total_bytes == version.plan.column_shard_bytes(version.manifest.tables)
    assert f"copied {total_bytes} bytes of column_wise shards" in caplog.text


def test_a_column_shard_keeps_its_rows_scale_and_bias(published: Publish) -> None:
    version = published(dtype="int8", sharding=SHARDING, world_size=2)
    sharded = sharded_on_cpu(version)
    attach_weights(sharded, version, "cpu")
    stored = torch.from_numpy(version.tables.rows("user").copy())
    assert stored.shape == (50, 36)
    movie = as_tensor(version.tables.rows("movie"))
    found = 0
    for kernel, config in sharded.tbes_configs().items():
        for table, offset in zip(
            config.embedding_tables, kernel.weights_physical_offsets, strict=True
        ):
            if table.name == "movie":
                column = table.local_metadata.shard_offsets[1]
                rows = kernel.weights_host[offset : offset + 1001 * 36].view(1001, 36)
                assert torch.equal(rows[:, :4], movie[:, :4])
                assert torch.equal(rows[:, 4:], movie[:, 4 + column : 4 + column + 32])
                found += 1
    assert found == 2


def test_weighted_module_shares_copied_rows_with_unweighted_module(published: Publish) -> None:
    version = published(sharding=SHARDING, world_size=2)
    plain, weighted = (sharded_on_cpu(version, is_weighted=one) for one in (False, True))
    attach_weights(plain, version, "cpu")
    share_rows(weighted, plain)

    def addresses(module: ShardedQuantEmbeddingBagCollection) -> list[int]:
        return [kernel.weights_host.data_ptr() for kernel in module.tbes_configs()]

    assert addresses(plain) == addresses(weighted)
    assert len(set(addresses(plain))) > 1
