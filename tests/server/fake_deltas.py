"""Models that follow deltas, without a line of deltas."""

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.status import DeltaStatus, SharedDeltaState
from embedserve.deltas.version_memory import VersionMemory
from embedserve.model_info import ModelInfo
from embedserve_store import ModelVersion
from embedserve_store.format.tables_file import TablesFile, header_bytes


def at_seq(info: ModelInfo, seq: int) -> ModelInfo:
    """Returns ``info`` with live rows of zeros at ``seq``. The rows stay mapped, without their
    file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.safetensors"
        with path.open("wb") as file:
            file.write(header_bytes(info.tables))
            file.truncate(file.tell() + info.manifest.nbytes)
        tables = TablesFile.open(path, info.tables)
        live = LiveRows(ModelVersion(path, info.manifest, info.plan, tables, {}), 1 << 20, 1)
    live.commit(2, seq)
    return replace(info, deltas=SharedDeltaState(live))


def shared_state(status: DeltaStatus, *, has_broker: bool = False) -> SharedDeltaState:
    """Returns a followed model with ``status``, whose rows no lookup reads."""
    start = status.read().applied.position(status.line)
    live = SimpleNamespace(uploaded=None, start=start, memory=VersionMemory.create())
    shared = SharedDeltaState(cast("LiveRows", live), has_broker=has_broker)
    shared.status = status
    return shared
