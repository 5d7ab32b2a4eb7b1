"""Caches compiled programs by layout, so that a version whose layout was served before is neither
sharded nor compiled again.

Compiling holds the GIL. A scripted program takes some 40 MB per layout, most of it in TorchScript's
executor. Few are therefore kept in addition to those that engines use.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import ref

from embedserve.engine.compile import SCRIPTED, TRACED, Program
from embedserve_store.format.id_rule import ROW_NUMBERS
from embedserve_store.format.manifest import Manifest
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import Plan

if TYPE_CHECKING:
    from embedserve.engine.engine import Engine

LAYOUTS_MAX = 16
"""Layouts whose programs are kept, without rows; the least recently used layout is evicted."""
SCRIPTED_MAX = 4
"""Scripted layouts kept among LAYOUTS_MAX, because each takes some 40 MB."""

Layout = tuple[str, object]


class Programs:
    """Cache of programs by layout: all programs that an engine uses, and the most recently used
    others. Not thread-safe."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self._by_layout: list[tuple[Layout, tuple[ref[Program], ...]]] = []
        self._kept: list[tuple[Program, ...]] = []  # the least recently used first
        for engine in engines:
            self.add(engine)

    def add(self, engine: Engine) -> bool:
        """Keeps the programs of ``engine``; returns whether they were compiled for it."""
        programs = tuple(one.program for one in engine.compiled if one.program is not None)
        if engine.device_type != "cpu" or len(programs) < len(engine.compiled):
            return True  # GPU and eager lookups cannot be given other rows
        layout = _layout(engine.manifest, engine.plan, engine.table_offsets, engine.lookup_kind)
        known = next((_alive(refs) for one, refs in self._by_layout if one == layout), None)
        is_new = known is None or known[0] is not programs[0]
        others = [one for one in self._kept if known is None or one[0] is not known[0]]
        self._kept = _programs_to_keep([*others, programs])
        del others, known
        self._by_layout = [
            (one, refs) for one, refs in self._by_layout if one != layout and _alive(refs)
        ]
        self._by_layout.append((layout, tuple(map(ref, programs))))
        return is_new

    def add_warm(self, engine: Engine) -> None:
        """Keeps the programs of ``engine`` as ``add`` does, and frees what compiling them left."""
        if self.add(engine):
            # Exceptions that torch caught hold its callers' frames, and all objects in these.
            gc.collect()

    def find(self, version: ModelVersion, plan: Plan) -> tuple[Program, ...] | None:
        """Returns the plain and the weighted program for ``version`` sharded by ``plan``, or None
        if they are not cached."""
        manifest, offsets = version.manifest, version.tables.offsets
        for layout, refs in self._by_layout:
            if layout == _layout(manifest, plan, offsets, layout[0]) and (programs := _alive(refs)):
                return programs
        return None


def _alive(refs: tuple[ref[Program], ...]) -> tuple[Program, ...] | None:
    """Returns the programs, or None if any of them has been freed."""
    found = tuple(one for one in (each() for each in refs) if one is not None)
    return found if len(found) == len(refs) else None


def _programs_to_keep(kept: list[tuple[Program, ...]]) -> list[tuple[Program, ...]]:
    """Returns the programs to keep, the least recently used first."""
    scripted = [one for one in kept if any(program.kind == SCRIPTED for program in one)]
    gone = {id(one) for one in scripted[:-SCRIPTED_MAX]}
    return [one for one in kept if id(one) not in gone][-LAYOUTS_MAX:]


def _layout(manifest: Manifest, plan: Plan, offsets: Mapping[str, int], kind: str) -> Layout:
    """Returns the properties that a program depends on. A trace over one rank does not depend on
    the number of rows of its tables, unless some of their columns are copied.

    Args:
        offsets: offset of each table in its mapping, which a scripted program fixes. In a part of a
            version it also depends on the tables of other parts.
    """
    tables = [replace(table, sha256="", ids=ROW_NUMBERS) for table in manifest.tables]
    if kind != TRACED:
        return kind, (tables, plan.world_size, plan.tables, offsets)
    if plan.column_shard_bytes(manifest.tables):
        return kind, (tables, plan.world_size, plan.tables)
    sharding = [plan.tables[table.name].sharding_type for table in tables]
    return kind, ([replace(table, num_embeddings=1) for table in tables], plan.world_size, sharding)
