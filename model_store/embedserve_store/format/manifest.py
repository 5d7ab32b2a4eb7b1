"""The manifest: what one published version contains, as frozen values and as JSON.

Reads and writes manifest.json and checks that it makes sense by itself. It never looks at
the other files of the version (local_store.py does) and never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.json_fields import typed
from embedserve_store.format.table_spec import (
    TableSpec,
    answer_keys,
    check_tables,
    check_weighted,
)

FORMAT_VERSION = 2
FORMAT_VERSIONS = (1, 2)
"""What this code reads. Version 1 knew no id rules but rows, and no unpooled tables."""
GOLDENS = "goldens"
"""In Manifest.source: what the goldens' answers were compared with, in words."""
FROM_TRAINING = "compared with the training model's own answers"
PARTLY_FROM_TRAINING = f"{FROM_TRAINING}, which cannot tell all"
FROM_DESCRIPTION = "of the rows, pooled as described: not compared with the training model"
CHECKED_FILES = ("plan.json", "goldens.safetensors")
"""Files whose sha256 the manifest holds as a whole; tables.safetensors is checked by table."""


@dataclass(frozen=True)
class KeyColumns:
    """Where one key of the answer lies: columns [start, end) of its values."""

    key: str
    feature: int
    """Position in Manifest.features of the feature that is looked up."""
    table: TableSpec
    start: int
    end: int


@dataclass(frozen=True)
class Manifest:
    """What one version of a model is: its tables in order, and everything derived from them."""

    model: str
    version: int
    tables: tuple[TableSpec, ...]
    is_weighted: bool
    """As the source EmbeddingBagCollection was built: its callers pass weights."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where the model came from: kind of source and where it lay, time, versions of the libraries,
    what the goldens were compared with, and under "meta" what its publisher said."""
    files: dict[str, str] = field(default_factory=dict)
    """sha256 of plan.json and goldens.safetensors, hexadecimal."""

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Features that requests may name (KJT keys), in order of first use by a table."""
        return tuple(dict.fromkeys(f for table in self.tables for f in table.feature_names))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys of the answer, in table order."""
        return answer_keys(self.tables)

    @cached_property
    def length_per_key(self) -> tuple[int, ...]:
        return tuple(table.embedding_dim for table in self.tables for _ in table.feature_names)

    @cached_property
    def columns(self) -> tuple[KeyColumns, ...]:
        """The columns of the answer, key by key."""
        position = {feature: i for i, feature in enumerate(self.features)}
        uses = [(table, feature) for table in self.tables for feature in table.feature_names]
        ends = accumulate(self.length_per_key)
        return tuple(
            KeyColumns(key, position[feature], table, end - table.embedding_dim, end)
            for key, (table, feature), end in zip(self.keys, uses, ends, strict=True)
        )

    @property
    def is_pooled(self) -> bool:
        """False for an EmbeddingCollection: one row for each id, all of one width."""
        return self.tables[0].pooling != "none"

    @cached_property
    def rule_per_feature(self) -> tuple[IdRule, ...]:
        """Tables that share a feature have one rule."""
        return tuple(
            next(table.ids for table in self.tables if feature in table.feature_names)
            for feature in self.features
        )

    @cached_property
    def rows_per_feature(self) -> tuple[int, ...]:
        """For each feature, ids are row numbers below this: the rows of its smallest table."""
        return tuple(
            min(table.num_embeddings for table in self.tables if feature in table.feature_names)
            for feature in self.features
        )

    @cached_property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "version": self.version,
            "is_weighted": self.is_weighted,
            "tables": [table.to_json() for table in self.tables],
            "source": self.source,
            "files": self.files,
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Manifest:
        """The manifest in ``data`` (parsed JSON). ``where`` names the file in errors.

        Raises:
            StoreError: a field is missing, of the wrong type or contradicts another, or the
                format version is not one that this code reads.
        """
        if not isinstance(data, dict):
            raise StoreError(f"{where}: expected a JSON object")
        format_version = data.get("format_version")
        if format_version not in FORMAT_VERSIONS:
            raise StoreError(
                f"{where}: format_version is {format_version!r}, "
                f"this embedserve reads format_version {' and '.join(map(str, FORMAT_VERSIONS))}"
            )
        tables = typed(data, "tables", list, where)
        manifest = cls(
            model=typed(data, "model", str, where),
            version=typed(data, "version", int, where),
            is_weighted=typed(data, "is_weighted", bool, where),
            tables=tuple(
                TableSpec.from_json(table, f"{where}: tables[{i}]")
                for i, table in enumerate(tables)
            ),
            source=typed(data, "source", dict, where),
            files=_files_from_json(typed(data, "files", dict, where), where),
        )
        check_tables(manifest.tables, where)
        check_weighted(manifest.tables, manifest.is_weighted, where)
        return manifest


def _files_from_json(data: dict[str, Any], where: str) -> dict[str, str]:
    for name in CHECKED_FILES:
        typed(data, name, str, f"{where}: files")
    return {name: data[name] for name in CHECKED_FILES}
