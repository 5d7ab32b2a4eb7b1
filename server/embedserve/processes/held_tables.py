"""How `serve` holds its tables: mapped from their files, or resident in this host's memory."""

from __future__ import annotations

import logging

from embedserve.config import ServeSettings
from embedserve.terminal.console import say, table_progress
from embedserve.terminal.sizes import human_bytes
from embedserve_store import ModelVersion
from embedserve_store.available_memory import available_bytes
from embedserve_store.resident import check_room, huge_page_bytes, make_resident

logger = logging.getLogger(__name__)

TABLES = ("mapped", "resident")


def refuse_on_cuda(settings: ServeSettings, device_type: str) -> None:
    """Raises ValueError for settings that make no sense where tables are copied to GPUs."""
    if device_type != "cuda":
        return
    if settings.workers > 1:
        raise ValueError(
            f"workers is {settings.workers}, but the tables go to GPUs, and each worker would copy "
            "them there again: use 1"
        )
    if settings.tables == "resident":
        raise ValueError(
            "tables is 'resident', but they are copied to GPUs, and nothing reads them in this "
            "host's memory: use mapped"
        )


def made_resident(versions: dict[str, ModelVersion]) -> dict[str, ModelVersion]:
    """``versions`` with their tables in memory, which processes forked later share.

    Raises:
        StoreError: there is no room for all of them, or a file cannot be read.
    """
    check_room(versions.values(), available_bytes())
    resident = {}
    for name, version in versions.items():
        say(f"copying the tables of {name} version {version.manifest.version} into memory")
        with table_progress() as progress:
            resident[name] = make_resident(version, progress)
    nbytes = sum(version.tables.data.nbytes for version in resident.values())
    in_huge_pages = huge_page_bytes(resident.values())
    logger.info(
        "%s of tables are resident, %s in huge pages",
        human_bytes(nbytes),
        human_bytes(min(nbytes, in_huge_pages)),
    )
    return resident
