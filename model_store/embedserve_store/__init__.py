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
    from embedserve_store.copying.copy_versions import CopiedModel as CopiedModel
    from embedserve_store.copying.copy_versions import copy_versions as copy_versions
    from embedserve_store.deltas.compact import compact_deltas as compact_deltas
    from embedserve_store.deltas.delta_line import DeltaLine as DeltaLine
    from embedserve_store.deltas.delta_writer import DeltaWriter as DeltaWriter
    from embedserve_store.deltas.prune import prune_deltas as prune_deltas
    from embedserve_store.deltas.undo import undo_deltas as undo_deltas
    from embedserve_store.errors import InvalidModelError as InvalidModelError
    from embedserve_store.errors import RevertedError as RevertedError
    from embedserve_store.errors import StoreError as StoreError
    from embedserve_store.errors import WriterFencedError as WriterFencedError
    from embedserve_store.format.alias import Alias as Alias
    from embedserve_store.format.event import Event as Event
    from embedserve_store.format.id_rule import IdRule as IdRule
    from embedserve_store.format.manifest import Manifest as Manifest
    from embedserve_store.format.note import Note as Note
    from embedserve_store.format.table_spec import TableSpec as TableSpec
    from embedserve_store.format.tables_file import Progress as Progress
    from embedserve_store.format.tables_file import TablesFile as TablesFile
    from embedserve_store.goldens.goldens_file import Bags as Bags
    from embedserve_store.goldens.goldens_file import Goldens as Goldens
    from embedserve_store.model_store import ModelStore as ModelStore
    from embedserve_store.model_version import ModelVersion as ModelVersion
    from embedserve_store.parts.part import NO_ROWS as NO_ROWS
    from embedserve_store.parts.part import LocalTables as LocalTables
    from embedserve_store.parts.part import Part as Part
    from embedserve_store.plans.constraints import TableConstraints as TableConstraints
    from embedserve_store.plans.constraints import read_constraints as read_constraints
    from embedserve_store.plans.host_plan import HostPlan as HostPlan
    from embedserve_store.plans.plan import Plan as Plan
    from embedserve_store.plans.plan import Shard as Shard
    from embedserve_store.plans.plan import TablePlan as TablePlan
    from embedserve_store.plans.plan import read_plan as read_plan
    from embedserve_store.publishing.add_note import add_note as add_note
    from embedserve_store.publishing.options import PublishOptions as PublishOptions
    from embedserve_store.publishing.pooled_error import PooledError as PooledError
    from embedserve_store.publishing.publish import publish as publish
    from embedserve_store.publishing.publish_sharded import publish_sharded as publish_sharded
    from embedserve_store.publishing.remove_versions import prune as prune
    from embedserve_store.publishing.remove_versions import remove_version as remove_version
    from embedserve_store.publishing.set_alias import Rollback as Rollback
    from embedserve_store.publishing.set_alias import roll_back as roll_back
    from embedserve_store.publishing.set_alias import set_alias as set_alias
    from embedserve_store.publishing.version_writer import PublishedVersion as PublishedVersion
    from embedserve_store.publishing.write_expected import write_expected as write_expected
    from embedserve_store.sources.description import Description as Description
    from embedserve_store.sources.description import read_description as read_description
    from embedserve_store.verification import verify as verify

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

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES]


def _import(name: str) -> object:
    """Imports a name of this package when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = _import
