"""Reads the description of a checkpoint's tables: the features, pooling and other missing fields.

The file is YAML or JSON and is checked key by key. Returns TableSpecs; never opens the checkpoint
or a vocabulary.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from embedserve_store.errors import InvalidModelError, checking_model
from embedserve_store.format.id_rule import ID_TYPES, RULES, UNKNOWN, IdRule
from embedserve_store.format.json_fields import typed
from embedserve_store.format.table_spec import TableSpec, check_tables, table_of

_DESCRIPTION_KEYS = ("tables", "is_weighted")
_REQUIRED_KEYS = ("name", "num_embeddings", "embedding_dim", "feature_names", "pooling")
_TABLE_KEYS = (*_REQUIRED_KEYS, "dtype", "ids", "sharding")
_GUESS = re.compile(r"(?:^|\s)#\s*check\b")
"""Mark that `embedserve describe` puts on lines that the author must check."""
_IDS_KEYS = {
    "rows": ("rule", "unknown", "default_row"),
    "modulo": ("rule", "modulus", "offset"),
    "map": ("rule", "vocabulary", "id_type", "unknown", "default_row"),
}


@dataclass(frozen=True)
class Description:
    """Description of the tables of a checkpoint, which holds weights but no features or pooling."""

    tables: tuple[TableSpec, ...]
    """Table specs. For the id rule "map", entries and sha256 are not yet known: 0 and ""."""
    is_weighted: bool = False
    vocabularies: Mapping[str, Path] = field(default_factory=dict)
    """Vocabulary file by table name, for every table with the rule "map"."""
    sharding: Mapping[str, str] = field(default_factory=dict)
    """Sharding by table name, for tables that specify it."""
    guesses: tuple[str, ...] = ()
    """Lines of a draft that are still marked "check", with file name and line number."""


def read_description(path: str | os.PathLike[str]) -> Description:
    """Reads a description from a .json file, or from YAML if the file has another suffix.

    ``tables`` is a list of ``name, num_embeddings, embedding_dim, feature_names, pooling`` and
    optionally ``dtype``, ``sharding`` and ``ids``. ``is_weighted`` is false by default. ``ids`` is
    a rule:

    - ``{rule: rows}``
    - ``{rule: modulo}``, with ``offset`` (0) and ``modulus`` (the table's rows after offset)
    - ``{rule: map, vocabulary: PATH}``, relative to the description, with ``id_type`` (int64)

    The rules rows and map take ``unknown`` (error, skip, or row with ``default_row``).

    Raises:
        StoreError: the file cannot be read.
        InvalidModelError: the file cannot be parsed, has a key twice in one mapping, or does not
            describe tables that can be served.
    """
    from embedserve_store.user_file import parse_user_file

    path = Path(path)
    text, data = parse_user_file(path)
    with checking_model():
        return replace(_description(data, path), guesses=_guesses(text, path))


def check_no_draft(description: Description) -> None:
    """Raises InvalidModelError if a guess of `embedserve describe` is still marked."""
    if description.guesses:
        more = len(description.guesses) - 1
        others = f" and {more} more" if more else ""
        raise InvalidModelError(
            f"{description.guesses[0]}{others}: guessed, and not checked: make it right and remove "
            "the mark, or publish what was guessed with --accept-draft (accept_draft=True)"
        )


def _guesses(text: str, path: Path) -> tuple[str, ...]:
    lines = enumerate(text.splitlines(), 1)
    return tuple(f"{path}: line {i}, {line.strip()!r}" for i, line in lines if _GUESS.search(line))


def _description(data: Any, path: Path) -> Description:
    where = str(path)
    _check_keys(data, _DESCRIPTION_KEYS, ("tables",), where)
    entries = typed(data, "tables", list, where)
    tables = tuple(_table(entry, f"{where}: tables[{i}]") for i, entry in enumerate(entries))
    check_tables(tables, where)
    named = dict(zip((table.name for table in tables), entries, strict=True))
    return Description(
        tables,
        typed({"is_weighted": False} | data, "is_weighted", bool, where),
        {
            name: path.parent / entry["ids"]["vocabulary"]
            for name, entry in named.items()
            if "vocabulary" in entry.get("ids", {})
        },
        {name: entry["sharding"] for name, entry in named.items() if "sharding" in entry},
    )


def _table(data: Any, where: str) -> TableSpec:
    _check_keys(data, _TABLE_KEYS, _REQUIRED_KEYS, where)
    typed({"sharding": ""} | data, "sharding", str, where)
    rows = typed(data, "num_embeddings", int, where)
    ids = _rule(data["ids"], rows, f"{where}: ids") if "ids" in data else IdRule()
    return table_of({"dtype": "float32"} | data, ids, where)


def _rule(data: Any, rows: int, where: str) -> IdRule:
    name = data.get("rule") if isinstance(data, dict) else None
    if name not in RULES:
        raise InvalidModelError(
            f"{where}: found {data!r:.60}, expected rule: NAME, one of {', '.join(RULES)}"
        )
    required = ("rule", "vocabulary") if name == "map" else ("rule",)
    _check_keys(data, _IDS_KEYS[name], required, f"{where} by {name}")
    if name == "modulo":
        offset = typed({"offset": 0} | data, "offset", int, where)
        modulus = typed({"modulus": rows - offset} | data, "modulus", int, where)
        rule = IdRule(name, modulus=modulus, offset=offset)
        rule.check(rows, where)
        return rule
    if name == "map":
        typed(data, "vocabulary", str, where)
    rule = IdRule(
        name,
        id_type=_one_of({"id_type": "int64"} | data, "id_type", ID_TYPES, where),
        unknown=_one_of({"unknown": "error"} | data, "unknown", UNKNOWN, where),
        default_row=typed({"default_row": 0} | data, "default_row", int, where),
    )
    _check_default_row(rule, data, rows, where)
    return rule


def _check_default_row(rule: IdRule, data: Mapping[str, Any], rows: int, where: str) -> None:
    """Checks ``default_row`` early, because it does not need the vocabulary.

    All other checks of a vocabulary wait until it is read.
    """
    if (rule.unknown == "row") != ("default_row" in data):
        raise InvalidModelError(f"{where}: unknown: row and default_row go together")
    if not 0 <= rule.default_row < rows:
        raise InvalidModelError(
            f"{where}: default_row is {rule.default_row}, the table has rows 0 to {rows - 1}"
        )


def _one_of(data: Mapping[str, Any], key: str, known: tuple[str, ...], where: str) -> str:
    value = data[key]
    if value not in known:
        raise InvalidModelError(f"{where}: {key} is {value!r}, expected {', '.join(known)}")
    return str(value)


def _check_keys(data: Any, known: tuple[str, ...], required: tuple[str, ...], where: str) -> None:
    if not isinstance(data, dict):
        raise InvalidModelError(f"{where}: found {data!r:.60}, expected keys {', '.join(known)}")
    for key in data:
        if key not in known:
            raise InvalidModelError(f"{where}: unknown key {key!r}, known are {', '.join(known)}")
    for key in required:
        if key not in data:
            raise InvalidModelError(f"{where}: {key} is missing")
