"""What a training run saved, opened: its tensors by key, and which of them are the tables.

Knows three kinds of checkpoint and state dicts in memory; each has a module of its own. Reads no
values and runs no code of a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.sources.prefix import at_prefix, shown
from embedserve_store.sources.rows import SOURCE_DTYPES, TableRows, TensorRows

COLLECTIONS = {"embedding_bags": True, "embeddings": False}
"""What TorchRec calls the tables of a collection in its state dict, and whether it pools."""
_PREFIXES_SHOWN = 10


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose values are not yet read."""

    kind: str
    """torch_save, dcp or safetensors; state_dict in memory."""
    path: Path
    tensors: Mapping[str, TableRows]
    """Every 2-D floating-point tensor by its full key. Getting one may raise StoreError: its
    shards are looked at then."""
    others: tuple[str, ...]
    """Names of everything else."""


@dataclass(frozen=True)
class TableKey:
    """A key that names a table: ``prefix`` is the path of its collection, "" at the top."""

    key: str
    prefix: str
    name: str
    is_pooled: bool


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a folder of torch.distributed.checkpoint, a .safetensors file or a folder of them,
    or a file of torch.save.

    Raises:
        StoreError: it cannot be read, is damaged, or holds code.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".distcp" or path.name == ".metadata":
        raise StoreError(f"{path}: is a part of a checkpoint, give its folder")
    if path.suffix == ".safetensors":
        from embedserve_store.sources.safetensors_source import open_safetensors

        return Checkpoint("safetensors", path, *open_safetensors(path))
    from embedserve_store.sources.torch_file import open_torch_file

    return Checkpoint("torch_save", path, *open_torch_file(path))


def _open_folder(path: Path) -> Checkpoint:
    from embedserve_store.sources.dcp import is_dcp, open_dcp
    from embedserve_store.sources.safetensors_source import open_safetensors

    if is_dcp(path):
        return Checkpoint("dcp", path, *open_dcp(path))
    if any(path.glob("*.safetensors")):
        return Checkpoint("safetensors", path, *open_safetensors(path))
    raise StoreError(
        f"{path}: a folder without .metadata, as torch.distributed.checkpoint writes it, and "
        "without .safetensors files"
    )


def from_state_dict(state_dict: Mapping[str, Any]) -> Checkpoint:
    """A state dict in memory, nested or not.

    Raises:
        StoreError: two entries have one key, or it contains itself.
    """
    from embedserve_store.sources.state_dict import split

    tensors, others = split(state_dict, "state dict")
    empty = tuple(key for key, tensor in tensors.items() if tensor.is_meta)
    rows = {key: TensorRows(tensor) for key, tensor in tensors.items() if key not in empty}
    return Checkpoint("state_dict", Path("state dict"), rows, (*others, *empty))


def table_keys(keys: Iterable[str], prefix: str = "") -> tuple[TableKey, ...]:
    """Those of ``keys`` that end in ``embedding_bags.<table>.weight`` or
    ``embeddings.<table>.weight``.

    Args:
        prefix: only those of the collections that it means (prefix.py) count.
    """
    found = [one for key in keys if (one := _table_key(key))]
    paths = at_prefix((one.prefix for one in found), prefix)
    return tuple(one for one in found if one.prefix in paths)


def _table_key(key: str) -> TableKey | None:
    parts = key.split(".")
    at = [i for i, part in enumerate(parts[:-2]) if part in COLLECTIONS]
    if not at or parts[-1] != "weight":
        return None
    last = at[-1]
    name = ".".join(parts[last + 1 : -1])
    return TableKey(key, ".".join(parts[:last]), name, COLLECTIONS[parts[last]])


def find_tables(
    checkpoint: Checkpoint, tables: Sequence[TableSpec], prefix: str = ""
) -> tuple[dict[str, TableRows], tuple[str, ...]]:
    """The rows of ``tables`` by table name, and the names of all other entries.

    Args:
        prefix: as ``table_keys``.

    Raises:
        InvalidModelError: a table is missing, is there several times, or is not a plain 2-D
            floating-point tensor.
        StoreError: a table's shards are missing, damaged or incomplete.
    """
    keys = (*checkpoint.tensors, *checkpoint.others)
    found = table_keys(keys, prefix)
    chosen = {table.name: _key_of(table, found, prefix) for table in tables}
    rows = {name: _rows(checkpoint, key, name) for name, key in chosen.items()}
    used = set(chosen.values())
    return rows, tuple(key for key in keys if key not in used)


def _key_of(table: TableSpec, found: Sequence[TableKey], prefix: str) -> str:
    is_pooled = table.pooling != "none"
    matches = [one for one in found if one.name == table.name and one.is_pooled == is_pooled]
    if not matches:
        raise InvalidModelError(f"table {table.name!r}: {_missing(table, found, prefix)}")
    if len(matches) > 1:
        shown = shown_prefixes(matches)
        raise InvalidModelError(
            f"table {table.name!r}: {len(matches)} collections have it: {shown}; "
            "choose one with prefix (--prefix)"
        )
    return matches[0].key


def shown_prefixes(found: Sequence[TableKey]) -> str:
    """Where the collections lie, as ``prefix`` takes it."""
    prefixes = shown(one.prefix for one in found)
    more = len(prefixes) - _PREFIXES_SHOWN
    return ", ".join(prefixes[:_PREFIXES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _missing(table: TableSpec, found: Sequence[TableKey], prefix: str) -> str:
    kind = "embeddings" if table.pooling == "none" else "embedding_bags"
    under = f" under {prefix!r}" if prefix else ""
    if any(one.name == table.name for one in found):
        other = "an EmbeddingBagCollection" if kind == "embeddings" else "an EmbeddingCollection"
        return f"its pooling is {table.pooling}, and the checkpoint has it in {other}"
    names = dict.fromkeys(one.name for one in found)
    return (
        f"no key{under} ends in {kind}.{table.name}.weight; the tables there are "
        f"{', '.join(list(names)[: _PREFIXES_SHOWN * 2]) or 'none'}"
    )


def _rows(checkpoint: Checkpoint, key: str, name: str) -> TableRows:
    if key not in checkpoint.tensors:
        raise InvalidModelError(
            f"table {name!r}: {key} is not a plain tensor of rows (2-D, floating-point); "
            "save sharded tables with torch.distributed.checkpoint"
        )
    try:
        return checkpoint.tensors[key]
    except StoreError as error:
        raise StoreError(f"table {name!r}: {error}") from error


def check_rows(table: TableSpec, rows: TableRows) -> None:
    """Raises InvalidModelError unless ``rows`` have the table's shape and a dtype that can be
    published."""
    where = f"table {table.name!r}"
    if isinstance(rows, TensorRows) and rows.is_meta:
        raise InvalidModelError(
            f"{where}: its weight is on meta, it has no values: load the trained ones first"
        )
    if rows.dtype not in SOURCE_DTYPES:
        raise InvalidModelError(
            f"{where}: its weight is {rows.dtype}, expected one of {', '.join(SOURCE_DTYPES)}"
        )
    described = (table.num_embeddings, table.embedding_dim)
    if rows.shape != described:
        raise InvalidModelError(
            f"{where}: its weight has shape {list(rows.shape)}, described is {list(described)}"
        )
