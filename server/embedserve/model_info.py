"""Models as requests see them: a served version's description, and a version that is pending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import orjson

from embedserve.model_names import split_name
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.parts.part import Part
from embedserve_store.plans.plan import Plan

if TYPE_CHECKING:
    from embedserve.deltas.status import SharedDeltaState

T = TypeVar("T")
SELECTIONS_MAX = SELECTION_PREFIXES_MAX = 16
"""Maximum number of key selections cached per model, and of response prefixes cached per selection.
All selections together hold at most 256 prefixes, as many as the model itself."""


class ServedParts(Protocol):
    """Parts of a version, and their replicas; fanout/shards.py has the implementation."""

    def describe(self, model: str, version: int) -> list[dict[str, Any]]:
        """Returns for each part its number, its replicas, and why it has none, as JSON values."""


@dataclass(frozen=True, eq=False)
class ModelInfo:
    """A served model: its manifest, how it is served, and properties that requests are checked
    against.

    Instances compare by identity, so that values derived from one can be cached cheaply. Properties
    of the manifest that each request needs are cached here: a cached_property costs no more than an
    attribute.

    Attributes:
        manifest: manifest of the version.
        plan: sharding plan, which assigns the shards of the tables to ranks.
        translator: translator from callers' ids to row numbers.
        device_type: "cpu" or "cuda".
        replanned: whether the plan differs from the stored one.
        lookup_kind: how lookups run: traced, scripted or eager; "parts" in a router.
        replicas: number of copies of the tables, each on its own GPUs; the plan describes one.
        fingerprint: fingerprint of the published version, equal wherever it or a part of it is
            served.
        part: part of the tables that this server holds; None if it serves whole tables.
        served_name: name given to --model: NAME, NAME@VERSION or NAME@ALIAS; "" for the model's
            plain name.
        example: features of an example request that this version can serve, shown in the API
            documentation.
        response_prefix_cache: cache of the codecs for response prefixes, by all that a prefix
            depends on. It is stored with the model, so that it is freed with it.
        deltas: changed rows and status of a model that follows deltas; None for others.
        shards: shards that hold the rows of a router's model; None for others.
        local_tables: names of the tables that a router looks up itself.
        selected: positions in the manifest's keys of the keys in responses; None for all keys.
        response_prefixes_max: maximum entries of ``response_prefix_cache``, which has one for each
            size of response.
        key_selections: cache of ``with_keys``, by the selected keys.
    """

    manifest: Manifest
    plan: Plan
    translator: IdTranslator
    device_type: str
    replanned: bool
    lookup_kind: str
    replicas: int = 1
    fingerprint: str = ""
    part: Part | None = None
    served_name: str = ""
    example: Mapping[str, Sequence[Sequence[int | str]]] = field(default_factory=dict)
    response_prefix_cache: dict[tuple[object, ...], Any] = field(default_factory=dict)
    deltas: SharedDeltaState | None = None
    shards: ServedParts | None = None
    local_tables: tuple[str, ...] = ()
    selected: tuple[int, ...] | None = None
    response_prefixes_max: int = 256
    key_selections: dict[tuple[str, ...], ModelInfo] = field(default_factory=dict)

    def cache_response_prefix(self, key: tuple[object, ...] | None, prefix: object) -> None:
        """Caches ``prefix``, which begins all responses with this ``key``; does nothing if ``key``
        is None."""
        if key is None:
            return
        if len(self.response_prefix_cache) >= self.response_prefixes_max:
            self.response_prefix_cache.clear()
        self.response_prefix_cache[key] = prefix

    @cached_property
    def json_start(self) -> bytes:
        """JSON that every JSON response begins with, serialized once by orjson."""
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
        """Unique name among the served versions: NAME, NAME@VERSION or NAME@ALIAS."""
        return self.served_name or self.name

    @cached_property
    def tag(self) -> str:
        """Part of ``served_as`` after the "@"; "" if there is none."""
        return split_name(self.served_as)[1]

    @cached_property
    def version(self) -> int:
        return self.manifest.version

    @cached_property
    def tables(self) -> tuple[TableSpec, ...]:
        return self.manifest.tables

    @cached_property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes of the tables on each rank."""
        return tuple(self.plan.served_bytes_per_rank(self.tables, self.device_type))

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Feature names that requests may use, in the order of the engine's input."""
        return self.manifest.features

    @cached_property
    def feature_positions(self) -> Mapping[str, int]:
        return {feature: at for at, feature in enumerate(self.features)}

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys of every response, as in a KeyedTensor."""
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
        """Column ranges of the vectors of ``keys`` in a row with all keys; adjacent ranges are
        merged."""
        ends = [0, *accumulate(self.manifest.length_per_key)]
        columns: list[slice] = []
        for at in range(len(ends) - 1) if self.selected is None else self.selected:
            start = columns.pop().start if columns and columns[-1].stop == ends[at] else ends[at]
            columns.append(slice(start, ends[at + 1]))
        return tuple(columns)

    def with_keys(self, keys: tuple[str, ...]) -> ModelInfo:
        """Returns this model restricted to ``keys``, as it describes responses with only these
        keys.

        The result has its keys in the model's order. It is cached, as callers select the same keys
        over and over.

        Args:
            keys: keys of this model, each once, in any order.
        """
        selection = self.key_selections.get(keys)
        if selection is None:
            selected = tuple(sorted(self.key_positions[key] for key in keys))
            selection = replace(
                self,
                selected=selected,
                response_prefixes_max=SELECTION_PREFIXES_MAX,
                response_prefix_cache={},
                key_selections={},
            )
            if len(self.key_selections) >= SELECTIONS_MAX:
                self.key_selections.clear()
            self.key_selections[keys] = selection
        return selection

    @cached_property
    def is_pooled(self) -> bool:
        """False for an EmbeddingCollection, which returns one row per id."""
        return self.manifest.is_pooled

    @cached_property
    def feature_per_key(self) -> np.ndarray:
        """int64 [keys], position of each key's feature in ``features``."""
        return np.array([columns.feature for columns in self.manifest.columns])

    @cached_property
    def keys_are_features(self) -> bool:
        """Whether every feature has exactly one table, so that the keys are the features in
        order."""
        return bool(np.array_equal(self.feature_per_key, np.arange(len(self.features))))

    @cached_property
    def string_features(self) -> frozenset[str]:
        """Names of the features whose ids are strings."""
        types = zip(self.features, self.translator.id_types, strict=True)
        return frozenset(feature for feature, id_type in types if id_type == "string")

    @cached_property
    def rejects_unknown(self) -> np.ndarray:
        """bool [F], whether an id without a row causes its request to be rejected."""
        return np.array([unknown == "error" for unknown in self.translator.unknown_per_feature])

    @cached_property
    def skips_unknown(self) -> np.ndarray:
        """bool [F], whether an id without a row is skipped."""
        return np.array([unknown == "skip" for unknown in self.translator.unknown_per_feature])

    @cached_property
    def response_bytes_per_example(self) -> int:
        """Bytes that an example adds to a response's float32 values; 0 for an unpooled model."""
        return 4 * sum(self.length_per_key) if self.is_pooled else 0

    @cached_property
    def response_bytes_per_id(self) -> int:
        """Maximum bytes that an id adds to a response's float32 values; 0 for a pooled model.

        A feature with several tables has a row from each of them.
        """
        if self.is_pooled:
            return 0
        return 4 * self.length_per_key[0] * int(np.bincount(self.feature_per_key).max())


@dataclass
class PendingVersion:
    """A version that is to serve a model and is not active yet.

    Attributes:
        version: number of the version.
        state: "loading", "warming", or "failed" if it will not become active.
        reason: why the version failed.
        since: time of the present state, ISO 8601 in UTC.
    """

    version: int
    state: str
    reason: str
    since: str


def now_iso() -> str:
    """Returns the current time in UTC as ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
