"""Writes torch.distributed.checkpoint folders shard by shard, as many ranks would."""

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Shard = tuple[tuple[int, int], torch.Tensor]
"""Offsets in the table, and the values from there on."""


def write_dcp(folder: Path, tables: Mapping[str, Sequence[Shard]]) -> Path:
    """Writes shard i of every table to rank i's file. A table ends where its last shards end."""
    folder.mkdir()
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, shards in tables.items():
        reach = [tuple(o + s for o, s in zip(at, t.shape, strict=True)) for at, t in shards]
        chunks = [ChunkStorageMetadata(torch.Size(at), t.shape) for at, t in shards]
        properties = TensorProperties(dtype=shards[0][1].dtype)
        size = torch.Size(map(max, *reach)) if len(reach) > 1 else torch.Size(reach[0])
        entries[key] = TensorStorageMetadata(properties, size, chunks)
        for i, (at, tensor) in enumerate(shards):
            name = f"__{i}_0.distcp"
            with (folder / name).open("ab") as file:
                begin = file.tell()
                torch.save(tensor, file)
                places[MetadataIndex(key, at, i)] = _StorageInfo(name, begin, file.tell() - begin)
    write_metadata(folder, Metadata(entries, storage_data=places))
    return folder


def write_metadata(folder: Path, metadata: Any, protocol: int | None = None) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))


def edit_metadata(folder: Path, change: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  just written
    change(metadata)
    write_metadata(folder, metadata)


def save_alone(state: Mapping[str, Any], folder: Path, **options: Any) -> None:
    """Saves with DCP's own function, without a process group. ``options`` are
    FileSystemWriter's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        writer = dcp.FileSystemWriter(folder, **options)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)


def grid(tensor: torch.Tensor, rows: int, columns: int) -> list[Shard]:
    """Returns ``tensor`` in shards of at most ``rows`` rows and ``columns`` columns."""
    return [
        ((row, column), part.clone())
        for row, band in zip(range(0, len(tensor), rows), tensor.split(rows), strict=True)
        for column, part in zip(
            range(0, tensor.shape[1], columns), band.split(columns, 1), strict=True
        )
    ]
