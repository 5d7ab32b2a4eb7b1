"""Vocabularies of the tables whose changed rows are named by ids. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from embedserve_store.format.manifest import Manifest
from embedserve_store.ids.id_map import IdMap
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion


class Vocabularies:
    """The vocabularies of a version, which is opened when one is first needed."""

    def __init__(self, models: ModelStore, base: Manifest) -> None:
        self._models, self._base = models, base
        self._rules = {table.name: table.ids.rule for table in base.tables}
        self._opened: ModelVersion | None = None

    def of(self, tables: Iterable[str]) -> Mapping[str, IdMap]:
        """Returns all vocabularies, if one of ``tables`` has one; a remote version is pulled."""
        if self._opened is None and any(self._rules.get(name) == "map" for name in tables):
            self._opened = self._models.load(self._base.model, self._base.version)
        return self._opened.id_maps if self._opened else {}
