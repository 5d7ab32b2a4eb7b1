"""Model store: publishes embedding tables as immutable versions, and opens them.

    from embedserve_store import ModelStore, publish, verify

    published = publish(ebc, "store", model="dlrm", dtype="int8", sharding="row_wise", world_size=2)
    print(published.path, published.errors["user"].relative_l2)   # store/dlrm/1 0.004

    version = ModelStore("store").load("dlrm")     # the newest; maps the tables, reads none
    verify(version)                                # reads every byte against its checksums
    version.manifest.tables, version.plan, version.goldens().stored_answers
    version.tables.rows("user")                    # uint8 [rows, row_bytes], mapped read-only

Importing this package does not import torch; publishing does.
"""

from embedserve_store.copying.copy_versions import CopiedModel, copy_versions
from embedserve_store.deltas.compact import compact_deltas
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.deltas.delta_writer import DeltaWriter
from embedserve_store.deltas.prune import prune_deltas
from embedserve_store.deltas.undo import undo_deltas
from embedserve_store.errors import InvalidModelError, RevertedError, StoreError, WriterFencedError
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
