"""Model store: publishes embedding tables as immutable versions, and opens them.

    from embedserve_store import ModelStore, publish, verify

    published = publish(ebc, "store", model="dlrm", dtype="int8", sharding="row_wise", world_size=2)
    print(published.path, published.errors["user"].relative_l2)   # store/dlrm/1 0.004

    version = ModelStore("store").load("dlrm")     # the newest; maps the tables, reads none
    verify(version)                                # reads every byte against its checksums
    version.manifest.tables, version.plan, version.goldens().stored_answers
    version.tables.rows("user")                    # uint8 [rows, row_bytes], mapped read-only

The first use of a name imports its module. Commands that use none, such as a probe's, start in half
the time. Only publishing imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embedserve_store.copying.copy_versions import CopiedModel, copy_versions
    from embedserve_store.deltas.compact import compact_deltas
    from embedserve_store.deltas.delta_line import DeltaLine
    from embedserve_store.deltas.delta_writer import DeltaWriter
    from embedserve_store.deltas.prune import prune_deltas
    from embedserve_store.deltas.undo import undo_deltas
    from embedserve_store.errors import (
        InvalidModelError,
        RevertedError,
        StoreError,
        WriterFencedError,
    )
    from embedserve_store.format.alias import Alias
    from embedserve_store.format.event import Event
    from embedserve_store.format.id_rule import IdRule
    from embedserve_store.format.manifest import Manifest
    from embedserve_store.format.note import Note
    from embedserve_store.format.table_spec import TableSpec
    from embedserve_store.format.tables_file import Progress, TablesFile
    from embedserve_store.goldens.goldens_file import Bags, Goldens
    from embedserve_store.model_store import ModelStore
    from embedserve_store.model_version import ModelVersion
    from embedserve_store.parts.part import NO_ROWS, LocalTables, Part
    from embedserve_store.plans.constraints import TableConstraints, read_constraints
    from embedserve_store.plans.host_plan import HostPlan
    from embedserve_store.plans.plan import Plan, Shard, TablePlan, read_plan
    from embedserve_store.publishing.add_note import add_note
    from embedserve_store.publishing.options import PublishOptions
    from embedserve_store.publishing.pooled_error import PooledError
    from embedserve_store.publishing.publish import publish
    from embedserve_store.publishing.publish_sharded import publish_sharded
    from embedserve_store.publishing.remove_versions import prune, remove_version
    from embedserve_store.publishing.set_alias import Rollback, roll_back, set_alias
    from embedserve_store.publishing.version_writer import PublishedVersion
    from embedserve_store.publishing.write_expected import write_expected
    from embedserve_store.sources.description import Description, read_description
    from embedserve_store.verification import verify

__all__ = [
    "NO_ROWS",
    "Alias",
    "Bags",
    "CopiedModel",
    "DeltaLine",
    "DeltaWriter",
    "Description",
    "Event",
    "Goldens",
    "HostPlan",
    "IdRule",
    "InvalidModelError",
    "LocalTables",
    "Manifest",
    "ModelStore",
    "ModelVersion",
    "Note",
    "Part",
    "Plan",
    "PooledError",
    "Progress",
    "PublishOptions",
    "PublishedVersion",
    "RevertedError",
    "Rollback",
    "Shard",
    "StoreError",
    "TableConstraints",
    "TablePlan",
    "TableSpec",
    "TablesFile",
    "WriterFencedError",
    "add_note",
    "compact_deltas",
    "copy_versions",
    "prune",
    "prune_deltas",
    "publish",
    "publish_sharded",
    "read_constraints",
    "read_description",
    "read_plan",
    "remove_version",
    "roll_back",
    "set_alias",
    "undo_deltas",
    "verify",
    "write_expected",
]

_NAMES = {
    "copying.copy_versions": "CopiedModel copy_versions",
    "deltas.compact": "compact_deltas",
    "deltas.delta_line": "DeltaLine",
    "deltas.delta_writer": "DeltaWriter",
    "deltas.prune": "prune_deltas",
    "deltas.undo": "undo_deltas",
    "errors": "InvalidModelError RevertedError StoreError WriterFencedError",
    "format.alias": "Alias",
    "format.event": "Event",
    "format.id_rule": "IdRule",
    "format.manifest": "Manifest",
    "format.note": "Note",
    "format.table_spec": "TableSpec",
    "format.tables_file": "Progress TablesFile",
    "goldens.goldens_file": "Bags Goldens",
    "model_store": "ModelStore",
    "model_version": "ModelVersion",
    "parts.part": "NO_ROWS LocalTables Part",
    "plans.constraints": "TableConstraints read_constraints",
    "plans.host_plan": "HostPlan",
    "plans.plan": "Plan Shard TablePlan read_plan",
    "publishing.add_note": "add_note",
    "publishing.options": "PublishOptions",
    "publishing.pooled_error": "PooledError",
    "publishing.publish": "publish",
    "publishing.publish_sharded": "publish_sharded",
    "publishing.remove_versions": "prune remove_version",
    "publishing.set_alias": "Rollback roll_back set_alias",
    "publishing.version_writer": "PublishedVersion",
    "publishing.write_expected": "write_expected",
    "sources.description": "Description read_description",
    "verification": "verify",
}
"""Names of this package, by their modules."""


def _import(name: str) -> object:
    """Imports a name of this package when it is first used."""
    for module, names in _NAMES.items():
        if name in names.split():
            found: object = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = _import
