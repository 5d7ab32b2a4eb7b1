"""Defines the manifest: the content of a published version, as frozen values and as JSON.

Converts a manifest from and to JSON, and checks its consistency. Never reads the other files of
the version (local_store.py does). Never imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import StoreError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.json_fields import parse_json, typed
from embedserve_store.format.manifest_checksum import SHA256_PATTERN, check_seal
from embedserve_store.format.table_groups import table_groups
from embedserve_store.format.table_spec import TableSpec, answer_keys, check_tables, check_weighted

if TYPE_CHECKING:  # commands that read no rows need no numpy
    import numpy as np
    from numpy.typing import NDArray

FORMAT_VERSION = 2
FORMAT_VERSIONS = (1, 2)
"""Format versions that this code reads. Version 1 has only the id rule rows, and only pooled
tables."""
GOLDENS = "goldens"
"""Key in Manifest.source of a text that describes the comparison of the goldens."""
FROM_TRAINING = "compared with the training model's own answers"
PARTLY_FROM_TRAINING = f"{FROM_TRAINING}, which cannot tell all"
FROM_DESCRIPTION = "of the rows, pooled as described: not compared with the training model"
PARTS = "parts_sha256"
"""Key of Manifest.part_checksums in the JSON."""
CHECKED_FILES = ("plan.json", "goldens.safetensors")
"""Files for which the manifest has a sha256 of the whole file. tables.safetensors has a sha256 for
each table."""


@dataclass(frozen=True)
class KeyColumns:
    """Columns [start, end) that a key has in the values of a response."""

    key: str
    feature: int
    """Index in Manifest.features of the feature that is looked up."""
    table: TableSpec
    start: int
    end: int


@dataclass(frozen=True)
class Manifest:
    """Content of a version: its tables in order, and the properties derived from them."""

    model: str
    version: int
    tables: tuple[TableSpec, ...]
    is_weighted: bool
    """Whether callers pass weights, as the source EmbeddingBagCollection was built."""
    source: dict[str, Any] = field(default_factory=dict)
    """Origin of the model: kind and location of the source, time, versions of the libraries, the
    comparison of the goldens, and the publisher's own fields under "meta"."""
    files: dict[str, str] = field(default_factory=dict)
    """Hexadecimal sha256 of plan.json and goldens.safetensors, by file name."""
    part_checksums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Hexadecimal sha256 of the rows of each part of the host plan, by table; empty without one."""

    @cached_property
    def _tables_by_feature(self) -> dict[str, list[TableSpec]]:
        found: dict[str, list[TableSpec]] = {}
        for table in self.tables:
            for feature in table.feature_names:
                found.setdefault(feature, []).append(table)
        return found

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Returns the features that requests may name (KJT keys), in order of first use."""
        return tuple(self._tables_by_feature)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Returns the keys of the response, in table order."""
        return answer_keys(self.tables)

    @cached_property
    def length_per_key(self) -> tuple[int, ...]:
        return tuple(table.embedding_dim for table in self.tables for _ in table.feature_names)

    @cached_property
    def columns(self) -> tuple[KeyColumns, ...]:
        """Returns the columns of the response, key by key."""
        position = {feature: i for i, feature in enumerate(self.features)}
        uses = [(table, feature) for table in self.tables for feature in table.feature_names]
        ends = accumulate(self.length_per_key)
        return tuple(
            KeyColumns(key, position[feature], table, end - table.embedding_dim, end)
            for key, (table, feature), end in zip(self.keys, uses, ends, strict=True)
        )

    @property
    def is_pooled(self) -> bool:
        """Returns False for an EmbeddingCollection, which returns one row per id, of one width."""
        return self.tables[0].pooling != "none"

    def answers_shape(self, lengths: NDArray[np.int32]) -> tuple[int, int]:
        """Returns the shape of the results for bags of ``lengths`` [F, B]."""
        if self.is_pooled:
            return lengths.shape[1], sum(self.length_per_key)
        totals = lengths.sum(axis=1, dtype="int64")
        return sum(int(totals[one.feature]) for one in self.columns), self.length_per_key[0]

    @cached_property
    def table_per_feature(self) -> tuple[TableSpec, ...]:
        """Returns the first table of each feature. Tables that share a feature have the same id
        rule and equal vocabularies."""
        return tuple(tables[0] for tables in self._tables_by_feature.values())

    @cached_property
    def rule_per_feature(self) -> tuple[IdRule, ...]:
        """Returns the id rule of each feature."""
        return tuple(table.ids for table in self.table_per_feature)

    @cached_property
    def rows_per_feature(self) -> tuple[int, ...]:
        """Returns the upper bound of the row numbers of each feature: its smallest table's rows."""
        return tuple(
            min(table.num_embeddings for table in tables)
            for tables in self._tables_by_feature.values()
        )

    @cached_property
    def table_groups(self) -> tuple[tuple[TableSpec, ...], ...]:
        """Returns the tables in groups that share features; see ``table_groups``."""
        return table_groups(self.tables)

    @cached_property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def check_place(self, model: str, version: int, where: str) -> None:
        """Raises StoreError if the manifest at ``where`` is not of this model and version."""
        if (self.model, self.version) != (model, version):
            raise StoreError(
                f"{where}: is of model {self.model!r} version {self.version}, but lies in the "
                f"folder of {model!r} version {version}"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Returns the hexadecimal sha256 of the manifest's JSON with sorted keys.

        It identifies a published version, whatever store or cache it is read from.
        """
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def has_same_content(self, other: Manifest) -> bool:
        """Returns whether both versions have the same rows, tables, id rules and plan.

        Goldens and the source may differ.
        """
        plans = {manifest.files.get("plan.json") for manifest in (self, other)}
        same = (self.tables, self.is_weighted) == (other.tables, other.is_weighted)
        return same and len(plans) == 1

    def to_json(self) -> dict[str, Any]:
        data = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "version": self.version,
            "is_weighted": self.is_weighted,
            "tables": [table.to_json() for table in self.tables],
            "source": self.source,
            "files": self.files,
        }
        if self.part_checksums:
            data[PARTS] = {name: list(parts) for name, parts in self.part_checksums.items()}
        return data

    @classmethod
    def from_json(cls, data: Any, where: str) -> Manifest:
        """Returns the manifest in ``data`` (parsed JSON).

        Raises:
            StoreError: a field is missing, has the wrong type or contradicts another field, or
                this code does not read the format version.
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
            part_checksums=_parts_from_json(data.get(PARTS, {}), where),
        )
        check_tables(manifest.tables, where)
        check_weighted(manifest.tables, manifest.is_weighted, where)
        _check_parts(manifest, where)
        return manifest


def _files_from_json(data: dict[str, Any], where: str) -> dict[str, str]:
    for name in CHECKED_FILES:
        typed(data, name, str, f"{where}: files")
    return {name: data[name] for name in CHECKED_FILES}


def _parts_from_json(data: Any, where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(data, dict):
        raise StoreError(f"{where}: {PARTS} is {data!r:.80}, expected lists by table")
    for name, parts in data.items():
        if not isinstance(parts, list) or not all(map(_is_sha256, parts)):
            raise StoreError(f"{where}: {PARTS}: {name!r} is {parts!r:.80}, expected sha256s")
    return {name: tuple(parts) for name, parts in data.items()}


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and SHA256_PATTERN.fullmatch(value) is not None


def _check_parts(manifest: Manifest, where: str) -> None:
    """Raises StoreError unless all tables have checksums of as many parts, or none has."""
    if not manifest.part_checksums:
        return
    names = {table.name for table in manifest.tables}
    for name in sorted(manifest.part_checksums.keys() ^ names):
        problem = "is missing" if name in names else "is not one of the tables"
        raise StoreError(f"{where}: {PARTS}: {name!r} {problem}")
    counts = {name: len(parts) for name, parts in manifest.part_checksums.items()}
    if len({*counts.values()}) > 1 or not min(counts.values()):
        raise StoreError(f"{where}: {PARTS}: the tables have checksums of {counts} parts")


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Returns the manifest in the bytes of manifest.json, after checking its seal.

    Raises:
        StoreError: the text is not JSON, is not a manifest, or has changed since it was published.
    """
    manifest = Manifest.from_json(parse_json(text, where), where)
    check_seal(text, where)
    return manifest
