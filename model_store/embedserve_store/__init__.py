"""The model store: publishes embedding tables as immutable versions, and opens them.

    from embedserve_store import ModelStore, publish, verify

    published = publish(ebc, "store", model="dlrm", dtype="int8", sharding="row_wise", world_size=2)
    print(published.path, published.errors["user"].relative)   # store/dlrm/1 0.004

    version = ModelStore("store").load("dlrm")     # the newest; maps the tables, reads none
    verify(version)                                # reads every byte against its checksums
    version.manifest.tables, version.plan, version.goldens().stored_answers
    version.tables.rows("user")                    # uint8 [rows, row_bytes], mapped read-only

Importing this package does not import torch; publishing does.
"""

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.goldens import Bags, Goldens
from embedserve_store.load import ModelStore, ModelVersion, verify
from embedserve_store.manifest import Manifest, TableSpec
from embedserve_store.plan import Plan, Shard, TablePlan
from embedserve_store.publish import publish, publish_state_dict
from embedserve_store.sources import Description, read_description, read_state_dict
from embedserve_store.tables_file import Progress, TablesFile
from embedserve_store.version_writer import PooledError, PublishedVersion

__all__ = [
    "Bags",
    "Description",
    "Goldens",
    "InvalidModelError",
    "Manifest",
    "ModelStore",
    "ModelVersion",
    "Plan",
    "PooledError",
    "Progress",
    "PublishedVersion",
    "Shard",
    "StoreError",
    "TablePlan",
    "TableSpec",
    "TablesFile",
    "publish",
    "publish_state_dict",
    "read_description",
    "read_state_dict",
    "verify",
]
