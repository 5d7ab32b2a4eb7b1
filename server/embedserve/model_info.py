"""Models as requests see them: a served version's description, and a version that is pending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import orjson

from embedserve.model_names import split_name
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.plans.plan import Plan

T = TypeVar("T")
PARTS_MAX = PART_STARTS_MAX = 16
"""Selections of a model's keys that are remembered, and beginnings of answers of each: all of them
together take as much as the model's own."""


@dataclass(frozen=True, eq=False)
class ModelInfo:
    """A served model: its manifest, how it is served, and what a request is checked against.

    Compared by identity, so that what is derived from it can be cached cheaply. What requests
    ask of the manifest is kept here: a cached_property costs no more than an attribute.

    Attributes:
        plan: which rank holds what.
        translator: turns callers' ids into row numbers.
        replanned: the plan is not the stored one.
        lookup_kind: how lookups run: traced, scripted or eager.
        selected: positions in the manifest's keys of those that answers have; None: all.
    """

    manifest: Manifest
    plan: Plan
    translator: IdTranslator
    device_type: str
    replanned: bool
    lookup_kind: str
    replicas: int = 1
    """Copies of the tables, each on GPUs of its own; the plan is of one."""
    served_name: str = ""
    """As --model has it, NAME, NAME@VERSION or NAME@ALIAS; "" for the first."""
    example: Mapping[str, Sequence[Sequence[int | str]]] = field(default_factory=dict)
    """The features of a request that it answers, to be shown."""
    response_prefix_cache: dict[tuple[object, ...], Any] = field(default_factory=dict)
    """What codecs keep with the model, so that it goes with it: by what it depends on."""
    selected: tuple[int, ...] | None = None
    response_prefixes_max: int = 256
    """Of ``response_prefix_cache``: one for each size of an answer."""
    key_selections: dict[tuple[str, ...], ModelInfo] = field(default_factory=dict)
    """What ``with_keys`` gave."""

    @cached_property
    def json_start(self) -> bytes:
        """What every JSON answer begins with; orjson's, kept with the model."""
        head = {
            "model": self.name,
            "version": self.version,
            "keys": self.keys,
            "length_per_key": self.length_per_key,
        }
        return orjson.dumps(head)[:-1]

    @cached_property
    def name(self) -> str:
        return self.manifest.model

    @cached_property
    def served_as(self) -> str:
        """NAME, NAME@VERSION or NAME@ALIAS, by which it is told from others of its model."""
        return self.served_name or self.name

    @cached_property
    def tag(self) -> str:
        """What follows the "@" of ``served_as``, "" for nothing."""
        return split_name(self.served_as)[1]

    @cached_property
    def version(self) -> int:
        return self.manifest.version

    @cached_property
    def tables(self) -> tuple[TableSpec, ...]:
        return self.manifest.tables

    @cached_property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Table bytes of each rank."""
        return tuple(self.plan.served_bytes_per_rank(self.tables, self.device_type))

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Names that requests may use, in the order of the engine's input."""
        return self.manifest.features

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Of every answer, as in a KeyedTensor."""
        return self._of_selected(self.manifest.keys)

    @cached_property
    def length_per_key(self) -> tuple[int, ...]:
        return self._of_selected(self.manifest.length_per_key)

    def _of_selected(self, of_all: tuple[T, ...]) -> tuple[T, ...]:
        return of_all if self.selected is None else tuple(of_all[at] for at in self.selected)

    @cached_property
    def key_positions(self) -> Mapping[str, int]:
        return {key: at for at, key in enumerate(self.keys)}

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """Where the vectors of ``keys`` lie in a row of all; those side by side as one."""
        ends = [0, *accumulate(self.manifest.length_per_key)]
        columns: list[slice] = []
        for at in range(len(ends) - 1) if self.selected is None else self.selected:
            start = columns.pop().start if columns and columns[-1].stop == ends[at] else ends[at]
            columns.append(slice(start, ends[at + 1]))
        return tuple(columns)

    def with_keys(self, keys: tuple[str, ...]) -> ModelInfo:
        """This model as answers with only ``keys`` describe it: each is one of its own, once; in
        the model's order whatever theirs. Kept, as callers ask for the same over and over."""
        part = self.key_selections.get(keys)
        if part is None:
            selected = tuple(sorted(self.key_positions[key] for key in keys))
            part = replace(
                self,
                selected=selected,
                response_prefixes_max=PART_STARTS_MAX,
                response_prefix_cache={},
                key_selections={},
            )
            if len(self.key_selections) >= PARTS_MAX:
                self.key_selections.clear()
            self.key_selections[keys] = part
        return part

    @cached_property
    def is_pooled(self) -> bool:
        """False for an EmbeddingCollection, answered by one row for each id."""
        return self.manifest.is_pooled

    @cached_property
    def feature_per_key(self) -> np.ndarray:
        """int64 [keys], where the feature of each key stands in ``features``."""
        return np.array([columns.feature for columns in self.manifest.columns])

    @cached_property
    def keys_are_features(self) -> bool:
        """Whether every feature serves one table, and so the keys are the features in order."""
        return bool(np.array_equal(self.feature_per_key, np.arange(len(self.features))))

    @cached_property
    def string_features(self) -> frozenset[str]:
        """Features whose ids are strings."""
        types = zip(self.features, self.translator.id_types, strict=True)
        return frozenset(feature for feature, id_type in types if id_type == "string")

    @cached_property
    def rejects_unknown(self) -> np.ndarray:
        """bool [F], whether an id without a row refuses its request."""
        return np.array([unknown == "error" for unknown in self.translator.unknown_per_feature])

    @cached_property
    def skips_unknown(self) -> np.ndarray:
        """bool [F], whether an id without a row is left out."""
        return np.array([unknown == "skip" for unknown in self.translator.unknown_per_feature])

    @cached_property
    def response_bytes_per_example(self) -> int:
        """Of an answer's values; 0 for an unpooled model."""
        return 4 * sum(self.length_per_key) if self.is_pooled else 0

    @cached_property
    def response_bytes_per_id(self) -> int:
        """The most that an id adds to an answer's values; 0 for a pooled model.

        A feature that several tables serve has a row of each of them.
        """
        if self.is_pooled:
            return 0
        return 4 * self.length_per_key[0] * int(np.bincount(self.feature_per_key).max())


@dataclass
class PendingVersion:
    """A version that a model is to be answered by, and is not yet.

    Attributes:
        state: loading, warming, or failed: it stays out.
        reason: why it failed.
        since: ISO 8601, UTC.
    """

    version: int
    state: str
    reason: str
    since: str


def now_iso() -> str:
    """ISO 8601, UTC, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
