"""Gives the kernels of a sharded model their rows out of the mapped tables file.

On CPU a kernel is pointed into the mapping, so that ranks, models and processes share the pages
and resharding moves nothing; only column shards, which are no range of the file, are copied. On
CUDA everything is copied to its device. Never writes to the mapping.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torchrec.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection

from embedserve.engine.cuda_limits import check_half_range
from embedserve.engine.kernel_rows import Rows
from embedserve_store.format.table_spec import CODES_MAX, SCALE_BIAS_BYTES, row_bytes
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import ROW_ALIGNMENT_BYTES

logger = logging.getLogger(__name__)

COPY_BLOCK_BYTES = 64 << 20


def bind_rows(
    sharded: ShardedQuantEmbeddingBagCollection, version: ModelVersion, device_type: str
) -> None:
    """Gives every kernel of ``sharded`` its shards' rows: on CPU mapped, on CUDA copied.

    Column shards are no range of the file: on CPU too they are copied, and only they. torchrec
    gives column_wise tables kernels of their own.
    """
    mapped = as_tensor(version.tables.data)
    copied_bytes = 0
    for kernel, config in sharded.tbes_configs().items():
        if device_type != "cpu":
            _copy_to_gpu(kernel, mapped, config, version)
        elif any(_is_column_shard(one) for one in config.embedding_tables):
            copied_bytes += _copy_columns(kernel, mapped, config, version)
        else:
            offsets = [start for start, _, _ in byte_ranges(config, version)]
            _point(kernel, mapped, offsets)
    if copied_bytes:
        logger.info("%s: copied %d bytes of column_wise shards", version.path, copied_bytes)


def _point(kernel: Any, rows: torch.Tensor, offsets: list[int]) -> None:
    """Lets a CPU ``kernel`` read its shards in ``rows`` (uint8) from these bytes on."""
    kernel.weights_host = rows
    kernel.host_size = rows.numel()
    kernel.weights_physical_offsets = offsets
    kernel.initialize_logical_weights_placements_and_offsets()
    kernel.weight_initialized = True


def share_rows(
    sharded: ShardedQuantEmbeddingBagCollection, bound: ShardedQuantEmbeddingBagCollection
) -> None:
    """Points the kernels of ``sharded`` at the rows of ``bound``, their twin of the same plan."""
    for kernel, twin in zip(sharded.tbes_configs(), bound.tbes_configs(), strict=True):
        kernel.weights_host, kernel.host_size = twin.weights_host, twin.host_size
        kernel.weights_dev, kernel.dev_size = twin.weights_dev, twin.dev_size
        kernel.weights_physical_offsets = twin.weights_physical_offsets
        kernel.initialize_logical_weights_placements_and_offsets()
        kernel.weight_initialized = True


def mapped_rows(version: ModelVersion, tables: Sequence[Sequence[str]]) -> list[Rows]:
    """What each CPU kernel reads of ``version``, and where in it the ``tables`` of its features
    begin, which on one rank lie whole."""
    mapped, offsets = as_tensor(version.tables.data), version.tables.offsets
    return [(mapped, torch.tensor([offsets[name] for name in names])) for names in tables]


def as_tensor(data: np.ndarray) -> torch.Tensor:
    """``data`` (read-only mapped uint8) as a tensor over the same memory, never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(data)


def byte_ranges(config: Any, version: ModelVersion) -> Iterator[tuple[int, int, int]]:
    """(first byte, rows, bytes of a row) in the mapped file of each table shard of a kernel; of
    a column shard, where its rows lie whole."""
    specs = {table.name: table for table in version.manifest.tables}
    for shard_config in config.embedding_tables:
        spec = specs[shard_config.name]
        first_row = shard_config.local_metadata.shard_offsets[0]
        start = version.tables.offsets[spec.name] + first_row * spec.row_bytes
        yield start, shard_config.local_rows, spec.row_bytes


def _is_column_shard(shard_config: Any) -> bool:
    return bool(shard_config.local_cols != shard_config.embedding_dim)


def _copy_columns(kernel: Any, mapped: torch.Tensor, config: Any, version: ModelVersion) -> int:
    """Gives a CPU ``kernel`` its shards in memory of its own; returns its bytes."""
    shards = list(_shard_rows(config, mapped, version))
    ends = list(accumulate(sum(part.numel() for part in parts) for parts in shards))
    offsets = [0, *ends[:-1]]
    rows = torch.empty(ends[-1], dtype=torch.uint8)
    for parts, start, end in zip(shards, offsets, ends, strict=True):
        target = rows[start:end].view(len(parts[0]), -1)
        for start_row, count in _blocks(target):
            _copy_block(parts, target, start_row, count)
    _point(kernel, rows, offsets)
    return rows.numel()


def _copy_to_gpu(kernel: Any, mapped: torch.Tensor, config: Any, version: ModelVersion) -> None:
    """Copies a kernel's shards to its GPU, each row padded to 16 bytes as CUDA kernels read it.

    Raises:
        StoreError: a row that these kernels cannot dequantize.
    """
    alignment = ROW_ALIGNMENT_BYTES["cuda"]
    specs = {table.name: table for table in version.manifest.tables}
    kernel.initialize_weights()
    for shard_config, parts, offset in zip(
        config.embedding_tables,
        _shard_rows(config, mapped, version),
        kernel.weights_physical_offsets,
        strict=True,
    ):
        rows, bytes_a_row = len(parts[0]), sum(part.shape[1] for part in parts)
        pitch = -(-bytes_a_row // alignment) * alignment
        target = kernel.weights_dev.narrow(0, offset, rows * pitch).view(rows, pitch)
        spec, first_row = specs[shard_config.name], shard_config.local_metadata.shard_offsets[0]
        stored = version.tables.rows(spec.name)[first_row : first_row + rows]
        for start, count in _blocks(target):
            if spec.dtype in CODES_MAX:
                heads = stored[start : start + count, :SCALE_BIAS_BYTES]
                check_half_range(heads, spec, first_row + start)
            _copy_block(parts, target, start, count)


def _shard_rows(
    config: Any, mapped: torch.Tensor, version: ModelVersion
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The stored bytes of each table shard of a kernel, as views of the mapping [rows, bytes]
    that stand side by side in its rows: of int8 and int4 columns scale and bias, then codes."""
    specs = {table.name: table for table in version.manifest.tables}
    ranges = byte_ranges(config, version)
    for (start, rows, bytes_a_row), shard_config in zip(
        ranges, config.embedding_tables, strict=True
    ):
        whole = mapped[start : start + rows * bytes_a_row].view(rows, bytes_a_row)
        if not _is_column_shard(shard_config):
            yield (whole,)
            continue
        dtype = specs[shard_config.name].dtype
        head = 0 if dtype.startswith("float") else SCALE_BIAS_BYTES
        column = shard_config.local_metadata.shard_offsets[1]
        first, last = (row_bytes(dtype, c) for c in (column, column + shard_config.local_cols))
        yield whole[:, :head], whole[:, first:last]


def _blocks(target: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(first, count) of the rows of ``target`` in blocks: torch first makes a copy of its own of
    what it pads on its way to a GPU."""
    rows = len(target)
    step = max(1, COPY_BLOCK_BYTES // target.shape[1])
    return ((row, min(step, rows - row)) for row in range(0, rows, step))


def _copy_block(
    parts: tuple[torch.Tensor, ...], target: torch.Tensor, start: int, count: int
) -> None:
    """Copies ``parts`` side by side into ``count`` rows of ``target``, whose padding stays."""
    block = target.narrow(0, start, count)
    column = 0
    for part in parts:
        block.narrow(1, column, part.shape[1]).copy_(part.narrow(0, start, count))
        column += part.shape[1]
