"""Opens one version, makes it resident, verifies and restores it: at the start, and when another
version takes over."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from embedserve.config import ServeSettings
from embedserve.config_checks import why_fixed
from embedserve.model_names import split_name
from embedserve_store import ModelStore, ModelVersion, StoreError, verify
from embedserve_store.errors import needing_memory
from embedserve_store.format.tables_file import Progress
from embedserve_store.memory.available_memory import available_bytes
from embedserve_store.memory.resident_tables import check_room, huge_page_bytes, make_resident
from embedserve_store.terminal.console import say, table_progress
from embedserve_store.terminal.sizes import human_bytes

if TYPE_CHECKING:
    from embedserve.deltas.live_rows import LiveRows
    from embedserve.deltas.status import SharedDeltaState
    from embedserve.engine.engine import Engine
    from embedserve.engine.programs import Programs

logger = logging.getLogger(__name__)


def load_named(store: ModelStore, name: str) -> ModelVersion:
    """Returns the version that ``name`` (NAME, NAME@VERSION or NAME@ALIAS) points to now; raises
    StoreError."""
    model, tag = split_name(name)
    return store.load(model, tag or None)


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError if a name cannot be NAME, NAME@VERSION or NAME@ALIAS, or if a name occurs
    twice."""
    for name in names:
        if name.endswith("@") or name.count("@") > 1:
            raise ValueError(f"model is {name!r}: expected NAME, NAME@VERSION or NAME@ALIAS")
    if len(set(names)) < len(names):
        raise ValueError(f"model is {', '.join(names)}: one is named twice")


def check_may_switch(settings: ServeSettings, device_type: str) -> None:
    """Raises StoreError if the served versions cannot change while the server runs, with tables on
    ``device_type``."""
    if why := why_fixed(settings, device_type):
        raise StoreError(f"what is served changes at a start only: {why}")


def make_resident_and_verify(
    settings: ServeSettings,
    versions: dict[str, ModelVersion],
    deltas: Mapping[str, SharedDeltaState] = MappingProxyType({}),
    *,
    is_shown: bool = True,
) -> dict[str, ModelVersion]:
    """Returns ``versions``, made resident and verified according to the settings. The verified
    bytes are the bytes that are served. Progress is shown on the console if ``is_shown``. All
    threads that it starts have ended when it returns.

    Args:
        deltas: followed models by served name. Their tables stay where they are, before the memory
            for changed rows.

    Raises:
        StoreError: the versions do not fit into memory, or differ from their published state.
    """
    if settings.tables == "resident":
        versions = _made_resident(versions, deltas, is_shown=is_shown)
    if settings.verify:
        for name, version in versions.items():
            what = f"verifying {name} version {version.manifest.version}"
            with _shown(what, is_shown) as progress:
                verify(version, progress)
    return versions


def _made_resident(
    versions: dict[str, ModelVersion], deltas: Mapping[str, SharedDeltaState], *, is_shown: bool
) -> dict[str, ModelVersion]:
    """Returns ``versions`` with their tables in memory, which processes forked later share.

    Raises:
        StoreError: there is no room for all versions, or a file cannot be read.
    """
    check_room(versions.values(), available_bytes())
    resident = {}
    for name, version in versions.items():
        what = f"copying the tables of {name} version {version.manifest.version} into memory"
        with _shown(what, is_shown) as progress:
            shared = deltas.get(name)
            resident[name] = (
                shared.live.make_resident(progress) if shared else make_resident(version, progress)
            )
    nbytes = sum(version.manifest.nbytes for version in resident.values())
    in_huge_pages = huge_page_bytes(resident.values())
    logger.info(
        "%s of tables are resident, %s in huge pages",
        human_bytes(nbytes),
        human_bytes(min(nbytes, in_huge_pages)),
    )
    return resident


@contextlib.contextmanager
def _shown(what: str, is_shown: bool) -> Iterator[Progress | None]:
    """Yields a progress callback that shows each table on the console, or None if not
    ``is_shown``. Raises StoreError if its block lacks memory."""
    with needing_memory(what):
        if not is_shown:
            yield None
            return
        say(what)
        with table_progress() as progress:
            yield progress


def restore_one(
    settings: ServeSettings,
    version: ModelVersion,
    programs: Programs,
    beside: Iterable[Engine] = (),
    live: LiveRows | None = None,
    on_warming: Callable[[], None] | None = None,
) -> Engine:
    """Returns the warm engine of ``version``, while the engines ``beside`` serve. It is compiled
    unless ``programs`` has its layout. ``live`` has its rows that change. Calls ``on_warming`` when
    it warms up.

    Raises:
        StoreError, ValueError: as in restore_all.
    """
    from embedserve.engine.restore import restore

    is_eager = settings.lookup == "eager"
    return restore(
        version,
        settings.devices,
        gpu_layout=settings.gpu_layout,
        strict_plan=settings.strict_plan,
        is_eager=is_eager,
        programs=programs,
        may_compile=is_eager or not any(engine.runs_modules for engine in beside),
        live=live,
        on_warming=on_warming,
    )
