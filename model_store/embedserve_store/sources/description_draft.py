"""Drafts the description of a checkpoint's tables, for its author to complete.

Returns text, not values. Fields that the checkpoint holds are filled in, and other fields are
guessed and marked "# check". Tables that cannot be served are left out and named in a comment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from math import inf

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import DTYPES, TableSpec, check_table
from embedserve_store.goldens.expected import Expected
from embedserve_store.sources.checkpoint import (
    Checkpoint,
    TableKey,
    check_lookups_unchanged,
    check_rows,
    no_rows,
    no_tables,
    shown_prefixes,
    table_keys,
)
from embedserve_store.sources.expected_tables import ShownTables, shown_tables


def draft_description(
    checkpoint: Checkpoint, prefix: str = "", expected: Expected | None = None
) -> str:
    """Returns YAML for read_description that describes the tables under ``prefix``.

    Args:
        expected: outputs of a training model. Fields that these outputs determine are filled in and
            not marked.

    Raises:
        InvalidModelError: no table can be served, or several collections cannot be described
            together (``prefix`` selects a collection). Also raised if no table gives the outputs of
            a key of ``expected``.
        StoreError: a table's shards are missing, damaged or incomplete.
    """
    keys = dict.fromkeys((*checkpoint.tensors, *checkpoint.others))
    found = table_keys(keys, prefix)
    if not found:
        raise InvalidModelError(f"{checkpoint.path}: {no_tables(keys, prefix)}")
    _check_one_model(found, checkpoint)
    good, bad = _read(checkpoint, found, keys)
    if not good:
        raise InvalidModelError(f"{checkpoint.path}: {bad[0]}")
    if expected is None:
        shown = ShownTables(tuple(good), frozenset(), frozenset(), is_ordered=False, absent=())
    else:
        tensors = {
            one.name: checkpoint.tensors[one.key] for one in found if one.key in checkpoint.tensors
        }
        try:
            shown = shown_tables(good, tensors, expected)
        except InvalidModelError as error:
            raise InvalidModelError("; left out: ".join([str(error), *bad[:1]])) from error
        bad += [f"table {name!r}: no key of the expected answers" for name in shown.absent]
    lines = [line for table in shown.tables for line in _entry(table, shown)]
    lines.insert(0, "tables:" + "  # check: answers are in this order" * (not shown.is_ordered))
    if good[0].pooling != "none":
        lines.append(_weighted(expected))
    comments = [*_head(checkpoint, len(keys) - len(found), found), *(f"left out: {r}" for r in bad)]
    if any("# check" in line for line in lines):
        comments.append('What is marked "check" is guessed: the checkpoint does not hold it.')
    if expected is not None:
        comments.append("What is not marked gives the training model's own answers.")
    return "\n".join([*(f"# {' '.join(one.split())}" for one in comments), *lines]) + "\n"


def _weighted(expected: Expected | None) -> str:
    if expected is None:
        return "is_weighted: false  # check: true if callers pass weights"
    return f"is_weighted: {'false' if expected.bags.weights is None else 'true'}"


def _check_one_model(found: Sequence[TableKey], checkpoint: Checkpoint) -> None:
    names = Counter(one.name for one in found)
    if max(names.values()) == 1 and len({one.is_pooled for one in found}) == 1:
        return
    raise InvalidModelError(
        f"{checkpoint.path}: several collections, which are not one model: "
        f"{shown_prefixes(found)}; choose one with prefix (--prefix)"
    )


def _read(
    checkpoint: Checkpoint, found: Sequence[TableKey], keys: Collection[str]
) -> tuple[list[TableSpec], list[str]]:
    """Returns the tables that can be served, and a reason for each other table.

    Args:
        keys: all keys of the checkpoint.
    """
    good: list[TableSpec] = []
    bad: list[str] = []
    for one in found:
        where = f"table {one.name!r}"
        if one.key not in checkpoint.tensors:
            bad.append(no_rows(one.key, one.name))
            continue
        rows = checkpoint.tensors[one.key]
        dtype = rows.dtype if rows.dtype in DTYPES else "float32"
        pooling = "sum" if one.is_pooled else "none"
        table = TableSpec(one.name, *rows.shape, (one.name,), pooling, dtype)
        try:
            check_table(table, where)
            check_lookups_unchanged(one, keys, has_vocabulary=True)
            check_rows(table, rows)
        except StoreError as error:
            bad.append(str(error))
        else:
            good.append(table)
    return good, bad


def _head(checkpoint: Checkpoint, skipped: int, found: Sequence[TableKey]) -> Iterator[str]:
    yield f"The tables of {checkpoint.path} ({checkpoint.kind}), prefix {shown_prefixes(found)}"
    if skipped:
        yield f"Skipped {skipped} other entries, such as dense layers and optimizer state."


def _entry(table: TableSpec, shown: ShownTables) -> Iterator[str]:
    name = _scalar(table.name)
    yield f"  - name: {name}"
    yield f"    num_embeddings: {table.num_embeddings}"
    yield f"    embedding_dim: {table.embedding_dim}"
    features = ", ".join(map(_scalar, table.feature_names))
    mark = "  # check: the features that look up this table" * (
        table.name not in shown.with_features
    )
    yield f"    feature_names: [{features}]{mark}"
    if table.pooling == "none":
        yield "    pooling: none  # of an EmbeddingCollection"
    else:
        mark = "  # check: sum or mean" * (table.name not in shown.with_pooling)
        yield f"    pooling: {table.pooling}{mark}"
    yield f"    dtype: {table.dtype}  # or {', '.join(d for d in DTYPES if d != table.dtype)}"


def _scalar(name: str) -> str:
    """Returns ``name`` as a YAML scalar, quoted unless YAML reads it as the same string."""
    import yaml

    if name.isidentifier() and yaml.safe_load(name) == name:
        return name
    return yaml.safe_dump(name, default_style='"', width=inf).rstrip()
