"""Finds the versions that a server starts with, pulls them, and restores them into warm engines."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from embedserve.config import ServeSettings
from embedserve.config_checks import check_device
from embedserve.model_names import split_name
from embedserve.on_missing import MissingPolicy
from embedserve.processes.forked import describe_exit, end_with_parent, fork
from embedserve.processes.model_loading import check_names, load_named, restore_one
from embedserve.processes.open_store import open_folder, row_selection, versions_to_hold
from embedserve_store import ModelStore, ModelVersion, StoreError
from embedserve_store.errors import (
    NoSuchPartError,
    UnknownAliasError,
    UnreachableError,
    missing_model,
    needing_memory,
)
from embedserve_store.remote.remote_store import is_url
from embedserve_store.terminal.console import console
from embedserve_store.terminal.stores import opened

if TYPE_CHECKING:
    from embedserve.deltas.status import SharedDeltaState
    from embedserve.engine.engine import Engine

logger = logging.getLogger(__name__)

_PULL_ERRORS = (UnreachableError, StoreError, OSError, ValueError)
"""Errors of open_versions that a child process reports to its parent; the first that fits."""
REMOTE_POLL_S = 2.0
"""Seconds between two polls of a remote store that does not have the models yet."""
LOCAL_POLL_S = 0.25
"""Seconds between two polls of such a store on this host, where a poll opens a few files."""


def open_versions(settings: ServeSettings) -> dict[str, ModelVersion]:
    """Returns the versions to serve, by served name. From a remote store they are first pulled.

    Raises:
        StoreError: there is no version, or a version cannot be read.
        ValueError: a setting is invalid.
    """
    names = list(settings.model)
    check_names(names)
    with opened(settings.store, settings.cache, row_selection(settings)) as store:
        # A model with a named version is served from the cache even if its remote store cannot be
        # reached. The store's list of models is therefore requested only where it is needed.
        if not all(split_name(name)[1] for name in names) or not names:
            published = store.models()
            _check_published(published, names, settings)
            names = names or published
        default = settings.default_model
        if default and not any(default in (name, split_name(name)[0]) for name in names):
            raise ValueError(
                f"default_model is {default!r}, but what is served is {', '.join(names)}"
            )
        if settings.part:
            return _loaded_parts(store, names, settings)
        versions = _loaded(store, names, default)
    MissingPolicy.parse(settings.on_missing).check_tables(
        {name: [table.name for table in one.manifest.tables] for name, one in versions.items()}
    )
    return versions


def _loaded_parts(
    store: ModelStore, names: Sequence[str], settings: ServeSettings
) -> dict[str, ModelVersion]:
    """Loads the part of each version that a shard is to hold, under its number: of a model without
    a version the newest ones and those that aliases name.

    Raises:
        StoreError: none of a model's versions, or one that ``names`` contains, cannot be loaded.
    """
    versions: dict[str, ModelVersion] = {}
    for name in names:
        model, tag = split_name(name)
        if tag:
            version = load_named(store, name)
            versions[f"{model}@{version.manifest.version}"] = version
            continue
        for number, one in _loaded_numbers(store, model, settings.versions_held).items():
            versions[f"{model}@{number}"] = one
    return versions


def _loaded_numbers(store: ModelStore, model: str, versions_held: int) -> dict[int, ModelVersion]:
    """Loads the versions of ``model`` that a shard is to hold, without those that cannot be loaded:
    one that was published by mistake must not stop a shard that starts again. Versions without its
    part do not count toward ``versions_held``.

    Raises:
        StoreError: none can be loaded; the reason is that of the newest.
    """
    loaded: dict[int, ModelVersion] = {}
    failed: dict[int, StoreError] = {}
    unfit: set[int] = set()
    while True:
        to_hold = versions_to_hold(store, model, versions_held, unfit).numbers
        for number in sorted(to_hold.difference(loaded, failed), reverse=True):
            try:
                loaded[number] = store.load(model, number)
            except StoreError as error:
                failed[number] = error
        found = {number for number in failed if isinstance(failed[number], NoSuchPartError)}
        if found == unfit:
            break
        unfit = found
    if not loaded:
        raise failed[max(failed)]
    for number, reason in failed.items():
        logger.warning("%s version %d is not held: %s", model, number, reason)
    return loaded


def _loaded(store: ModelStore, names: Sequence[str], default: str) -> dict[str, ModelVersion]:
    """Loads the versions of ``names``. Leaves out an alias that was removed, as by a rollback, if
    another version of its model is served: a restarted server then serves what the others serve.

    Args:
        default: name of a model or of a version that is never left out.

    Raises:
        StoreError: one cannot be loaded, or a name has an alias that never existed.
    """
    versions: dict[str, ModelVersion] = {}
    removed: dict[str, UnknownAliasError] = {}
    for name in names:
        try:
            versions[name] = load_named(store, name)
        except UnknownAliasError as error:
            if name == default or not store.alias_history(*split_name(name)):
                raise
            removed[name] = error
    served = {split_name(name)[0] for name in versions}
    for name, unknown in removed.items():
        if split_name(name)[0] not in served:
            raise unknown
        logger.warning(
            "%s is not served, its alias was removed: once it is set again, start the server again "
            "or have it load %s",
            name,
            name,
        )
    return versions


def opened_in_time(
    settings: ServeSettings, open_all: Callable[[ServeSettings], dict[str, ModelVersion]]
) -> dict[str, ModelVersion]:
    """Returns the result of ``open_all``. If ``settings.wait`` is set, it retries until
    ``open_all`` succeeds, and logs each new reason once.

    Raises:
        StoreError: the error of ``open_all``, if ``settings.wait`` is not set.
    """
    logged = ""
    while True:
        try:
            return open_all(settings)
        except StoreError as error:
            if not settings.wait:
                raise
            if str(error) != logged:
                logged = str(error)
                logger.warning("waiting for what is to be served: %s", logged)
        time.sleep(REMOTE_POLL_S if is_url(settings.store) else LOCAL_POLL_S)


def with_default_model(settings: ServeSettings, names: Iterable[str]) -> ServeSettings:
    """Returns ``settings`` with the default model of a server that starts with ``names``. It stays
    the default while others are loaded and unloaded, also in workers that start later."""
    models = {split_name(name)[0] for name in names}
    only = models.pop() if len(models) == 1 else ""
    return replace(settings, default_model=settings.default_model or only)


def _check_published(published: list[str], names: list[str], settings: ServeSettings) -> None:
    """Raises StoreError if the model of one of ``names`` has not been published. Without names the
    server serves all published models, and the default model must be one of them."""
    for name in names or filter(None, [settings.default_model]):
        model = split_name(name)[0]
        if model not in published:
            raise missing_model(settings.store, model, published)
    if not published:
        raise StoreError(f"{settings.store}: no model in this store; publish one first")


def open_versions_to_fork(settings: ServeSettings) -> dict[str, ModelVersion]:
    """Returns the same versions as open_versions, in a process that will fork. Clients of remote
    stores have threads, so a child process pulls the versions. This process then opens the pulled
    folders.

    Raises:
        StoreError, OSError, ValueError: as in open_versions; StoreError also if the child ended
            early. The child writes the traceback of another error to stderr.
    """
    if not is_url(settings.store):
        return open_versions(settings)
    child, channel = fork(partial(_report_pulled, settings, os.getpid()), lambda: None)
    try:
        with channel, channel.makefile("rb") as stream:
            report = stream.read()
    except BaseException:  # by SIGTERM; the next pull continues with what the child leaves
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not report:
        how = describe_exit(os.waitstatus_to_exitcode(status))
        raise StoreError(f"{settings.store}: the process that pulls it {how}")
    pulled = json.loads(report)
    for kind in _PULL_ERRORS:
        if reason := pulled["errors"].get(kind.__name__):
            raise kind(reason)
    return {
        name: replace(open_folder(path, row_selection(settings)), at_seq=at_seq)
        for name, (path, at_seq) in pulled["folders"].items()
    }


def _report_pulled(settings: ServeSettings, parent: int, channel: socket.socket) -> int:
    """Writes folder and at_seq of each version to ``channel``, or the error; returns the exit code.
    The process ends when ``parent`` does."""
    end_with_parent(parent)
    folders: dict[str, tuple[str, int | None]] = {}
    errors: dict[str, str] = {}
    try:
        for name, one in open_versions(settings).items():
            folders[name] = str(one.path), one.at_seq
    except _PULL_ERRORS as error:
        kind = next(one for one in _PULL_ERRORS if isinstance(error, one))
        errors[kind.__name__] = str(error)
    channel.sendall(json.dumps({"folders": folders, "errors": errors}).encode())
    return 0


def on_devices(
    settings: ServeSettings, versions: dict[str, ModelVersion], *, is_shown: bool
) -> ServeSettings:
    """Returns ``settings`` with the devices and GPU layout settled for all of ``versions``. They
    are settled once, for the versions restored now and for all later ones. Imports torch. Progress
    is shown on the console if ``is_shown``.

    Raises:
        ValueError: a setting does not fit the devices of this host.
    """
    # All that is imported and loaded stays; run_server excludes it from collections.
    gc.disable()
    with _status("importing PyTorch and TorchRec", is_shown):
        from embedserve.engine.gpus import gpus_for
        from embedserve.engine.restore import settle_devices
    devices, gpu_layout = settle_devices(
        settings.devices,
        versions,
        gpus_for(settings.devices),
        gpu_layout=settings.gpu_layout,
        strict_plan=settings.strict_plan,
    )
    check_device(settings, devices)
    return replace(settings, devices=devices, gpu_layout=gpu_layout)


@contextlib.contextmanager
def _status(what: str, is_shown: bool) -> Iterator[None]:
    """Shows ``what`` on the console within its block. Raises StoreError if that lacks memory."""
    status = console.status(f"{what} …") if is_shown else contextlib.nullcontext()
    with needing_memory(what), status:
        yield


def restore_all(
    settings: ServeSettings,
    versions: dict[str, ModelVersion],
    deltas: Mapping[str, SharedDeltaState],
    *,
    is_shown: bool,
) -> dict[str, Engine]:
    """Returns the warm engine of each of ``versions``, by the same names. Progress is shown on the
    console if ``is_shown``.

    Args:
        settings: settings as returned by on_devices.
        deltas: followed models, by served name.

    Raises:
        StoreError: a version cannot be served on these devices, or its results are wrong.
        ValueError: ``settings.devices`` names no existing devices.
    """
    import torch

    # Large batches are split over our own lookup threads. torch's threads would spin while idle, on
    # cores that others need.
    torch.set_num_threads(1)
    from embedserve.engine.programs import Programs

    engines: dict[str, Engine] = {}
    programs = Programs()
    for name, version in versions.items():
        with _status(f"restoring {name} version {version.manifest.version}", is_shown):
            live = deltas[name].live if name in deltas else None
            engines[name] = restore_one(settings, version, programs, live=live)
        programs.add(engines[name])
    return engines
