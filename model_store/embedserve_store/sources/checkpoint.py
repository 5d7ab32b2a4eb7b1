"""Opens a checkpoint: its tensors by key, and which of them are embedding tables.

Supports three kinds of checkpoint and in-memory state dicts, each in a module of its own. Reads no
values and runs no code of a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.sources.prefix import at_prefix, shown
from embedserve_store.sources.rows import SOURCE_DTYPES, TableRows, TensorRows

COLLECTIONS = {"embedding_bags": True, "embeddings": False}
"""Names under which TorchRec's collections keep their tables in a state dict, and whether the
collection is pooled."""
_PREFIXES_SHOWN = 10

_MAPS_IDS = "_managed_collision_collection"
_PRUNED = ("_itep_module", "_rowwise_itep_module")
"""Modules of in-training embedding pruning: of unsharded and most sharded tables, and of row-wise
sharded tables."""
_CHANGES_LOOKUPS = {
    "_embedding_bag_collection": ("_feature_processors", *_PRUNED),
    "_embedding_collection": _PRUNED,
    "_embedding_module": (_MAPS_IDS,),
}
"""Modules of TorchRec that change ids or weights before the lookup, by the name of the collection
beside them. A vocabulary can stand for managed collisions, and for no other module."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose values have not been read."""

    kind: str
    """Kind of the checkpoint: torch_save, dcp or safetensors; state_dict if in memory."""
    path: Path
    tensors: Mapping[str, TableRows]
    """Every 2-D floating-point tensor by its full key. Getting a tensor of a DCP checkpoint or a
    file of torch.save finds its values there, and may raise StoreError."""
    others: tuple[str, ...]
    """Keys of all other entries."""


@dataclass(frozen=True)
class TableKey:
    """A key that names a table.

    Attributes:
        key: full key in the state dict.
        prefix: path of the table's collection, "" at the top level.
        name: name of the table.
        is_pooled: whether the table is in an EmbeddingBagCollection.
    """

    key: str
    prefix: str
    name: str
    is_pooled: bool


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint of any supported kind.

    ``path`` is a folder of torch.distributed.checkpoint, a .safetensors file, a folder of such
    files, or a file of torch.save. It is never a URL.

    Raises:
        StoreError: the checkpoint cannot be read, is damaged, holds code, or is named by a URL.
    """
    path = Path(path)
    if os.path.isdir(path):
        return _open_folder(path)
    scheme, colon, rest = str(path).partition(":/")  # a Path has lost a slash of its URL
    if colon and "/" not in scheme and not os.path.exists(path):  # a folder may be named "s3:"
        raise StoreError(
            f"{scheme}://{rest.lstrip('/')}: a checkpoint is a path, never a URL; copy it first"
        )
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
    """Returns a Checkpoint over an in-memory state dict, nested or flat.

    Raises:
        StoreError: two entries have the same key, or the state dict contains itself.
    """
    from embedserve_store.sources.state_dict import split

    tensors, others = split(state_dict, "state dict")
    empty = tuple(key for key, tensor in tensors.items() if tensor.is_meta)
    rows = {key: TensorRows(tensor) for key, tensor in tensors.items() if key not in empty}
    return Checkpoint("state_dict", Path("state dict"), rows, (*others, *empty))


def table_keys(keys: Iterable[str], prefix: str = "") -> tuple[TableKey, ...]:
    """Returns the keys of tables.

    A key ends in ``embedding_bags.<table>.weight`` or ``embeddings.<table>.weight``.

    Args:
        prefix: selects the collections whose keys are returned (prefix.py).
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
    checkpoint: Checkpoint,
    tables: Sequence[TableSpec],
    prefix: str = "",
    with_vocabulary: Collection[str] = (),
) -> tuple[dict[str, TableRows], tuple[str, ...]]:
    """Returns the rows of ``tables`` by table name, and the keys of all other entries.

    Args:
        prefix: selects collections, as in ``table_keys``.
        with_vocabulary: names of the tables whose ids a vocabulary maps to rows.

    Raises:
        InvalidModelError: a table is missing, occurs several times, or is not a plain 2-D
            floating-point tensor. Also raised if another module changes the ids or weights of the
            table's lookups.
        StoreError: a table's shards are missing, damaged or incomplete.
    """
    keys = dict.fromkeys((*checkpoint.tensors, *checkpoint.others))
    found: dict[str, list[TableKey]] = {}
    for one in table_keys(keys, prefix):
        found.setdefault(one.name, []).append(one)
    if not found:
        raise InvalidModelError(no_tables(keys, prefix))
    chosen = {}
    for table in tables:
        one = _key_of(table, found, prefix)
        check_lookups_unchanged(one, keys, table.name in with_vocabulary)
        chosen[table.name] = one.key
    rows = {name: _rows(checkpoint, key, name) for name, key in chosen.items()}
    used = set(chosen.values())
    return rows, tuple(key for key in keys if key not in used)


def _key_of(table: TableSpec, found: Mapping[str, Sequence[TableKey]], prefix: str) -> TableKey:
    is_pooled = table.pooling != "none"
    matches = [one for one in found.get(table.name, ()) if one.is_pooled == is_pooled]
    if not matches:
        raise InvalidModelError(f"table {table.name!r}: {_missing(table, found, prefix)}")
    if len(matches) > 1:
        shown = shown_prefixes(matches)
        raise InvalidModelError(
            f"table {table.name!r}: {len(matches)} collections have it: {shown}; "
            "choose one with prefix (--prefix)"
        )
    return matches[0]


def check_lookups_unchanged(table: TableKey, keys: Collection[str], has_vocabulary: bool) -> None:
    """Raises InvalidModelError if another module changes the ids or weights of lookups, or if rows
    are stored by id.

    Args:
        keys: all keys of the checkpoint.
    """
    if f"{table.key}_id" in keys:
        raise InvalidModelError(
            f"table {table.name!r}: {table.key}_id has the ids of its rows, as of a virtual table: "
            "only a table of numbered rows can be published"
        )
    parent, _, collection = table.prefix.rpartition(".")
    for module in _CHANGES_LOOKUPS.get(collection, ()):
        path = f"{parent}.{module}" if parent else module
        if not any(key.startswith(f"{path}.") for key in keys):
            continue
        if module != _MAPS_IDS:
            raise InvalidModelError(
                f"table {table.name!r}: {path} beside it changes ids or weights before they are "
                "looked up: only its rows could be served"
            )
        if not has_vocabulary:
            raise InvalidModelError(
                f"table {table.name!r}: {path} beside it maps ids to rows: publish the table with "
                "a vocabulary, from id to row"
            )


def shown_prefixes(found: Sequence[TableKey]) -> str:
    """Returns the paths of the collections as the option ``prefix`` takes them."""
    prefixes = shown(one.prefix for one in found)
    more = len(prefixes) - _PREFIXES_SHOWN
    return ", ".join(prefixes[:_PREFIXES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def no_tables(keys: Collection[str], prefix: str) -> str:
    """Returns the error that no key under ``prefix`` is that of a table."""
    under = f" under {prefix!r}" if prefix else ""
    elsewhere = table_keys(keys) if prefix else ()
    return (
        f"no key{under} ends in embedding_bags.<table>.weight or embeddings.<table>.weight, "
        f"of {len(keys)} entries"
        + (f"; there are tables under {shown_prefixes(elsewhere)}" if elsewhere else "")
    )


def _missing(table: TableSpec, found: Collection[str], prefix: str) -> str:
    kind = "embeddings" if table.pooling == "none" else "embedding_bags"
    under = f" under {prefix!r}" if prefix else ""
    if table.name in found:
        other = "an EmbeddingBagCollection" if kind == "embeddings" else "an EmbeddingCollection"
        return f"its pooling is {table.pooling}, and the checkpoint has it in {other}"
    return (
        f"no key{under} ends in {kind}.{table.name}.weight; the tables there are "
        f"{', '.join(list(found)[: _PREFIXES_SHOWN * 2]) or 'none'}"
    )


def _rows(checkpoint: Checkpoint, key: str, name: str) -> TableRows:
    if key not in checkpoint.tensors:
        raise InvalidModelError(no_rows(key, name))
    try:
        return checkpoint.tensors[key]
    except StoreError as error:
        raise StoreError(f"table {name!r}: {error}") from error


def no_rows(key: str, table: str) -> str:
    """Returns the error that the entry ``key`` of a checkpoint has no rows of ``table``."""
    return (
        f"table {table!r}: {key} is not a plain tensor of rows (2-D, floating-point): save sharded "
        "tables with torch.distributed.checkpoint, and publish tables as trained, not quantized"
    )


def check_rows(table: TableSpec, rows: TableRows) -> None:
    """Raises InvalidModelError unless ``rows`` have the table's shape and a publishable dtype."""
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
