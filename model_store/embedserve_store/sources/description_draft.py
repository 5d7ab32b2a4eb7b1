"""A draft of the description of a checkpoint's tables, for its author to complete.

Gives text, not values: what the checkpoint holds is filled in, what it does not hold is guessed
and marked "# check", and what cannot be served is left out and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import DTYPES, TableSpec, check_table
from embedserve_store.sources.checkpoint import (
    Checkpoint,
    TableKey,
    check_rows,
    shown_prefixes,
    table_keys,
)


def draft_description(checkpoint: Checkpoint, prefix: str = "") -> str:
    """YAML that read_description reads, of the tables under the dotted path ``prefix``.

    Raises:
        InvalidModelError: no table can be served, or several collections cannot be described
            together: prefix chooses one.
        StoreError: a table's shards are missing, damaged or incomplete.
    """
    keys = (*checkpoint.tensors, *checkpoint.others)
    found = table_keys(keys, prefix)
    if not found:
        under = f" under {prefix!r}" if prefix else ""
        raise InvalidModelError(
            f"{checkpoint.path}: no key{under} ends in embedding_bags.<table>.weight or "
            f"embeddings.<table>.weight, of {len(keys)} entries"
        )
    _check_one_model(found, checkpoint)
    good, bad = _read(checkpoint, found)
    if not good:
        raise InvalidModelError(f"{checkpoint.path}: {bad[0]}")
    comments = [*_head(checkpoint, len(keys) - len(found), found), *(f"left out: {r}" for r in bad)]
    lines = [f"# {' '.join(comment.split())}" for comment in comments]
    lines += ["tables:  # check: answers are in this order"]
    lines += [line for table in good for line in _entry(table)]
    if good[0].pooling != "none":
        lines += ["is_weighted: false  # check: true if callers pass weights"]
    return "\n".join(lines) + "\n"


def _check_one_model(found: Sequence[TableKey], checkpoint: Checkpoint) -> None:
    names = Counter(one.name for one in found)
    if max(names.values()) == 1 and len({one.is_pooled for one in found}) == 1:
        return
    raise InvalidModelError(
        f"{checkpoint.path}: several collections, which are not one model: "
        f"{shown_prefixes(found)}; choose one with prefix (--prefix)"
    )


def _read(checkpoint: Checkpoint, found: Sequence[TableKey]) -> tuple[list[TableSpec], list[str]]:
    """The tables that can be served, and for each other one the reason."""
    good: list[TableSpec] = []
    bad: list[str] = []
    for one in found:
        where = f"table {one.name!r}"
        if one.key not in checkpoint.tensors:
            bad.append(f"{where}: {one.key} is not a plain tensor of rows (2-D, floating-point)")
            continue
        rows = checkpoint.tensors[one.key]
        dtype = rows.dtype if rows.dtype in DTYPES else "float32"
        pooling = "sum" if one.is_pooled else "none"
        table = TableSpec(one.name, *rows.shape, (one.name,), pooling, dtype)
        try:
            check_table(table, where)
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
    yield 'What is marked "check" is guessed: the checkpoint does not hold it.'


def _entry(table: TableSpec) -> Iterator[str]:
    name = _scalar(table.name)
    yield f"  - name: {name}"
    yield f"    num_embeddings: {table.num_embeddings}"
    yield f"    embedding_dim: {table.embedding_dim}"
    yield f"    feature_names: [{name}]  # check: the features that look up this table"
    if table.pooling == "none":
        yield "    pooling: none  # of an EmbeddingCollection"
    else:
        yield f"    pooling: {table.pooling}  # check: sum or mean"
    yield f"    dtype: {table.dtype}  # or {', '.join(d for d in DTYPES if d != table.dtype)}"


def _scalar(name: str) -> str:
    """``name`` in YAML, quoted where it would read as something else than a string."""
    import yaml

    return name if yaml.safe_load(name) == name and name.isidentifier() else f"'{name}'"
