"""Attaches the rows of the mapped tables file to the kernels of a sharded model.

On CPU a kernel points into the mapping, so that ranks, models and processes share the pages and
resharding moves nothing. Only column shards, which are no contiguous range of the file, are copied.
On CUDA all rows are copied to their device (device_upload.py). The mapping is never written to.
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

from embedserve.engine.device_upload import RowCopy, copy_all
from embedserve.engine.gpu_spare_rows import GpuSpareRows
from embedserve.engine.kernel_rows import KernelTables, Rows, place_shards
from embedserve_store.format.table_spec import SCALE_BIAS_BYTES, row_bytes
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import row_pitch

logger = logging.getLogger(__name__)


def attach_weights(
    sharded: ShardedQuantEmbeddingBagCollection,
    version: ModelVersion,
    device_type: str,
    spare_rows: GpuSpareRows | None = None,
) -> None:
    """Gives every kernel of ``sharded`` its shards' rows: mapped on CPU, copied on CUDA. There the
    room for rows that change is that of ``spare_rows``.

    Column shards are no contiguous range of the file, so they are copied on CPU, too; no other rows
    are. torchrec gives column_wise tables separate kernels.

    Raises:
        StoreError: a row that the CUDA kernels cannot dequantize.
    """
    if device_type != "cpu":
        copy_all(gpu_copies(sharded, version, spare_rows), str(version.path))
        return
    mapped = as_tensor(version.tables.data)
    copied_bytes = 0
    for kernel, config in sharded.tbes_configs().items():
        rows, offsets = _cpu_rows(mapped, config, version)
        kernel.weights_host, kernel.host_size = rows, rows.numel()
        place_shards(kernel, offsets)
        if rows is not mapped:
            copied_bytes += rows.numel()
    if copied_bytes:
        logger.info("%s: copied %d bytes of column_wise shards", version.path, copied_bytes)


def share_rows(
    sharded: ShardedQuantEmbeddingBagCollection, source: ShardedQuantEmbeddingBagCollection
) -> None:
    """Points the kernels of ``sharded`` at the rows of ``source``, which has the same plan. A
    kernel on another GPU gets a copy of the rows, made from GPU to GPU."""
    for kernel, twin in zip(sharded.tbes_configs(), source.tbes_configs(), strict=True):
        device = kernel.current_device
        kernel.weights_host, kernel.host_size = twin.weights_host.to(device), twin.host_size
        kernel.weights_dev, kernel.dev_size = twin.weights_dev.to(device), twin.dev_size
        place_shards(kernel, twin.weights_physical_offsets)


def cpu_rows(version: ModelVersion, kernels: Sequence[KernelTables]) -> list[Rows]:
    """Returns the rows of ``version`` that each CPU kernel reads. They are mapped; column shards
    are copied, as in attach_weights."""
    mapped, rows = as_tensor(version.tables.data), []
    for kernel in kernels:
        data, offsets = _cpu_rows(mapped, kernel.config, version)
        rows.append((data, torch.tensor([offsets[shard] for shard in kernel.shards])))
    return rows


def _cpu_rows(
    mapped: torch.Tensor, config: Any, version: ModelVersion
) -> tuple[torch.Tensor, list[int]]:
    """Returns the rows that a CPU kernel reads (uint8), and the byte offset of each shard in
    them."""
    if has_column_shards(config):
        return _copied_columns(mapped, config, version)
    return mapped, [start for start, _, _ in byte_ranges(config, version)]


def as_tensor(data: np.ndarray) -> torch.Tensor:
    """Returns ``data`` (read-only mapped uint8) as a tensor over the same memory, which is never
    written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(data)


def byte_ranges(config: Any, version: ModelVersion) -> Iterator[tuple[int, int, int]]:
    """Yields (first byte, rows, bytes of a row) in the mapped file for each table shard of a
    kernel. For a column shard this is the range of its whole rows."""
    for shard_config in config.embedding_tables:
        spec = version.tables.tables[shard_config.name]
        first_row = shard_config.local_metadata.shard_offsets[0]
        start = version.tables.offsets[spec.name] + first_row * spec.row_bytes
        yield start, shard_config.local_rows, spec.row_bytes


def _is_column_shard(shard_config: Any) -> bool:
    return bool(shard_config.local_cols != shard_config.embedding_dim)


def has_column_shards(config: Any) -> bool:
    """Returns whether a kernel's shards are columns of their tables. torchrec gives such shards
    separate kernels."""
    return any(_is_column_shard(one) for one in config.embedding_tables)


def _copied_columns(
    mapped: torch.Tensor, config: Any, version: ModelVersion
) -> tuple[torch.Tensor, list[int]]:
    """Returns a copy of the column shards of a CPU kernel (uint8), and the offset of each shard in
    it."""
    shards = list(_shard_rows(config, mapped, version))
    sizes = [sum(part.numel() for part in parts) for parts in shards]
    offsets = [0, *accumulate(sizes)]
    rows = torch.empty(offsets.pop(), dtype=torch.uint8)
    for shard_config, parts, start, size in zip(
        config.embedding_tables, shards, offsets, sizes, strict=True
    ):
        target = rows[start : start + size].view(len(parts[0]), -1)
        _row_copy(shard_config, parts, target, version).fill(target, 0)
    return rows, offsets


def gpu_copies(
    sharded: ShardedQuantEmbeddingBagCollection,
    version: ModelVersion,
    spare_rows: GpuSpareRows | None = None,
) -> list[list[RowCopy]]:
    """Returns the row copies that each GPU's kernels need. Allocates the kernels' memory, with each
    row padded to 16 bytes, as the CUDA kernels read it."""
    mapped = as_tensor(version.tables.data)
    of_devices: dict[torch.device, list[RowCopy]] = {}
    for kernel, config in sharded.tbes_configs().items():
        if spare_rows is None:
            kernel.initialize_weights()
        else:
            spare_rows.reserve(kernel, config)
        copies = of_devices.setdefault(kernel.weights_dev.device, [])
        for shard_config, parts, offset in zip(
            config.embedding_tables,
            _shard_rows(config, mapped, version),
            kernel.weights_physical_offsets,
            strict=True,
        ):
            rows, pitch = len(parts[0]), row_pitch(sum(part.shape[1] for part in parts), "cuda")
            target = kernel.weights_dev.narrow(0, offset, rows * pitch).view(rows, pitch)
            copies.append(_row_copy(shard_config, parts, target, version))
    return list(of_devices.values())


def _row_copy(
    shard_config: Any,
    parts: tuple[torch.Tensor, ...],
    target: torch.Tensor,
    version: ModelVersion,
) -> RowCopy:
    tables, first_row = version.tables, shard_config.local_metadata.shard_offsets[0]
    return RowCopy(
        table=tables.tables[shard_config.name],
        first_row=first_row,
        stored=tables.rows(shard_config.name)[first_row : first_row + len(target)],
        is_mapped=tables.is_mapped,
        parts=parts,
        target=target,
    )


def _shard_rows(
    config: Any, mapped: torch.Tensor, version: ModelVersion
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the stored bytes of each table shard of a kernel, as views of the mapping [rows,
    bytes]. The views go side by side into the target rows. For int8 and int4 column shards these
    are scale and bias, then codes."""
    ranges = byte_ranges(config, version)
    for (start, rows, bytes_a_row), shard_config in zip(
        ranges, config.embedding_tables, strict=True
    ):
        whole = mapped[start : start + rows * bytes_a_row].view(rows, bytes_a_row)
        if not _is_column_shard(shard_config):
            yield (whole,)
            continue
        dtype = version.tables.tables[shard_config.name].dtype
        head = 0 if dtype.startswith("float") else SCALE_BIAS_BYTES
        column = shard_config.local_metadata.shard_offsets[1]
        first, last = (row_bytes(dtype, c) for c in (column, column + shard_config.local_cols))
        yield whole[:, :head], whole[:, first:last]
