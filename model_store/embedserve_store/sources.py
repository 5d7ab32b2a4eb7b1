"""Reads what a model is published from: a description of its tables and a file of torch.save.

The description is YAML or JSON and gives TableSpecs; the state dict gives their weights. Code
in a checkpoint is never run: torch reads it with weights_only, and nothing else reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.manifest import TableSpec, check_table, check_tables, typed

if TYPE_CHECKING:
    import torch

_NESTED = ("state_dict", "model")
"""Where training scripts put the state dict inside a checkpoint."""

_DESCRIPTION_KEYS = ("tables", "is_weighted")
_REQUIRED_KEYS = ("name", "num_embeddings", "embedding_dim", "feature_names", "pooling")
_TABLE_KEYS = (*_REQUIRED_KEYS, "dtype")


@dataclass(frozen=True)
class Description:
    """The tables of a state dict, which holds weights but no features or pooling."""

    tables: tuple[TableSpec, ...]
    is_weighted: bool


def read_description(path: Path) -> Description:
    """Reads ``tables: [{name, num_embeddings, embedding_dim, feature_names, pooling, dtype?}]``
    and ``is_weighted?: false`` from a .json file, or YAML of any other name.

    Raises:
        StoreError: the file cannot be read or parsed.
        InvalidModelError: it is not a description of tables that can be served.
    """
    data = _parse_description(path)
    where = str(path)
    try:
        return _description(data, where)
    except InvalidModelError:
        raise
    except StoreError as error:
        raise InvalidModelError(str(error)) from error


def _parse_description(path: Path) -> Any:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"{path}: cannot be parsed: {reason}") from error


def _description(data: Any, where: str) -> Description:
    _check_keys(data, _DESCRIPTION_KEYS, ("tables",), where)
    tables = tuple(
        _table(table, f"{where}: tables[{i}]")
        for i, table in enumerate(typed(data, "tables", list, where))
    )
    check_tables(tables, where)
    is_weighted = typed({"is_weighted": False} | data, "is_weighted", bool, where)
    return Description(tables, is_weighted)


def _table(data: Any, where: str) -> TableSpec:
    _check_keys(data, _TABLE_KEYS, _REQUIRED_KEYS, where)
    features = typed(data, "feature_names", list, where)
    if not all(isinstance(feature, str) for feature in features):
        raise InvalidModelError(f"{where}: feature_names is {features}, expected a list of names")
    table = TableSpec(
        name=typed(data, "name", str, where),
        num_embeddings=typed(data, "num_embeddings", int, where),
        embedding_dim=typed(data, "embedding_dim", int, where),
        feature_names=tuple(features),
        pooling=typed(data, "pooling", str, where),
        dtype=typed({"dtype": "float32"} | data, "dtype", str, where),
    )
    check_table(table, where)
    return table


def _check_keys(data: Any, known: tuple[str, ...], required: tuple[str, ...], where: str) -> None:
    if not isinstance(data, dict):
        raise InvalidModelError(f"{where}: found {data!r:.60}, expected keys {', '.join(known)}")
    for key in data:
        if key not in known:
            raise InvalidModelError(f"{where}: unknown key {key!r}, known are {', '.join(known)}")
    for key in required:
        if key not in data:
            raise InvalidModelError(f"{where}: {key} is missing")


def read_state_dict(path: Path) -> dict[str, Any]:
    """What torch.save wrote to ``path``, its tensors mapped from the file and not yet read.

    Raises:
        StoreError: the file cannot be read, holds code or objects, or is not a dict.
    """
    import torch

    try:
        path.open("rb").close()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        state_dict = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise StoreError(f"{path}: {_refusal(str(error))}") from error
    if not isinstance(state_dict, dict):
        raise StoreError(f"{path}: holds a {type(state_dict).__name__}, expected a state dict")
    return state_dict


def _refusal(message: str) -> str:
    """What torch would not load, as one line and without its advice to allow code."""
    forbidden = re.search(r"GLOBAL (\S+)", message)
    if forbidden:
        return (
            f"refused: it holds {forbidden[1]}, which only running code of the file could "
            "restore; save a plain state dict of tensors"
        )
    reason = " ".join(message.rpartition("WeightsUnpickler error:")[2].split())
    return f"not a state dict as torch.save writes it, or truncated: {reason:.200}"


def find_tables(
    state_dict: Mapping[str, Any], tables: tuple[TableSpec, ...]
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The weights of ``tables``, and the names of all other entries.

    A table's key ends in ``embedding_bags.<table>.weight``, at top level or inside an entry
    ``state_dict`` or ``model``.

    Raises:
        InvalidModelError: a table is missing, is there twice, or is not a tensor.
    """
    entries = dict(_flattened(state_dict))
    weights = {}
    used = set()
    for table in tables:
        suffix = f".embedding_bags.{table.name}.weight"
        keys = [key for key in entries if f".{key}".endswith(suffix)]
        if not keys:
            found = [key for key in entries if ".embedding_bags." in f".{key}"]
            raise InvalidModelError(
                f"table {table.name!r}: no key ends in {suffix[1:]!r}; the tables there are "
                f"{', '.join(found[:20]) or 'none'}"
            )
        if len(keys) > 1:
            raise InvalidModelError(
                f"table {table.name!r}: {len(keys)} entries match: {', '.join(keys)}"
            )
        weights[table.name] = entries[keys[0]]
        used.add(keys[0])
    return weights, tuple(key for key in entries if key not in used)


def _flattened(state_dict: Mapping[str, Any]) -> list[tuple[str, Any]]:
    entries = []
    for key, value in state_dict.items():
        if key in _NESTED and isinstance(value, Mapping):
            entries += [(f"{key}.{inner}", item) for inner, item in value.items()]
        else:
            entries.append((str(key), value))
    return entries


def check_weight(table: TableSpec, weight: Any) -> None:
    """Raises InvalidModelError unless ``weight`` is the rows of ``table``, whole and readable."""
    import torch

    where = f"table {table.name!r}"
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        raise InvalidModelError(
            f"{where}: its weight is a {type(weight).__name__}, expected a plain torch.Tensor"
        )
    if weight.layout != torch.strided or weight.device.type == "meta":
        raise InvalidModelError(
            f"{where}: its weight has no data: {weight.layout}, {weight.device}"
        )
    if weight.dtype not in (torch.float32, torch.float16):
        raise InvalidModelError(
            f"{where}: its weight is {weight.dtype}, expected torch.float32 or torch.float16"
        )
    described = (table.num_embeddings, table.embedding_dim)
    if tuple(weight.shape) != described:
        raise InvalidModelError(
            f"{where}: its weight has shape {list(weight.shape)}, described is {list(described)}"
        )
