"""Keeps the programs of the layouts that were served last, so that a version whose layout was
served before is neither sharded nor compiled again.

TorchScript keeps what it compiled for as long as the process lives. A model that changes between
two layouts would add to it with each change, and hold the interpreter's lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from embedserve.engine.script import TRACED, Program
from embedserve_store.format.id_rule import ROW_NUMBERS
from embedserve_store.format.manifest import Manifest
from embedserve_store.plans.plan import Plan

if TYPE_CHECKING:
    from embedserve.engine.engine import Engine

LAYOUTS_MAX = 16
"""Layouts whose programs are kept, without rows; the least recently used goes."""

Layout = tuple[str, object]


class Programs:
    """Programs by layout, the least recently used first. Used by one thread at a time."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self._by_layout: list[tuple[Layout, tuple[Program, ...]]] = []
        for engine in engines:
            self.add(engine)

    def add(self, engine: Engine) -> bool:
        """Keeps the programs of ``engine``; returns whether they were compiled for it."""
        programs = tuple(one.program for one in engine.compiled if one.program is not None)
        if engine.device_type != "cpu" or len(programs) < len(engine.compiled):
            return True  # they have rows of their own
        layout = _layout(engine.manifest, engine.plan, engine.lookup_kind)
        known = self._take(layout)
        self._by_layout.append((layout, programs))
        del self._by_layout[:-LAYOUTS_MAX]
        return known != programs

    def find(self, manifest: Manifest, plan: Plan) -> tuple[Program, ...] | None:
        """Returns the programs of a version, plain and weighted; None where none are kept."""
        for layout, programs in self._by_layout:
            if layout == _layout(manifest, plan, layout[0]):
                return programs
        return None

    def _take(self, layout: Layout) -> tuple[Program, ...] | None:
        for at, (one, programs) in enumerate(self._by_layout):
            if one == layout:
                del self._by_layout[at]
                return programs
        return None


def _layout(manifest: Manifest, plan: Plan, kind: str) -> Layout:
    """Returns all that a program depends on. A trace of one rank does not depend on how many rows
    its tables have, unless some of their columns are copied."""
    tables = [replace(table, sha256="", ids=ROW_NUMBERS) for table in manifest.tables]
    if kind != TRACED or plan.column_shard_bytes(manifest.tables):
        return kind, (tables, plan.world_size, plan.tables)
    sharding = [plan.tables[table.name].sharding_type for table in tables]
    return kind, ([replace(table, num_embeddings=1) for table in tables], plan.world_size, sharding)
