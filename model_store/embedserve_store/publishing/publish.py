"""Publishes a model: checks it, plans its shards, writes the version and reports.

``publish`` takes a live module, a state dict or a checkpoint. publish_source.py turns each of them
into a TableSource, and the rest of the path is shared. If anything fails, no version appears and
nothing is left behind. Imports torch only when called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Unpack

from embedserve_store.errors import InvalidModelError, StoreError, checking_model, failed_write
from embedserve_store.format.coverage import COMPARED
from embedserve_store.format.manifest import (
    FROM_DESCRIPTION,
    FROM_TRAINING,
    GOLDENS,
    PARTLY_FROM_TRAINING,
    Manifest,
)
from embedserve_store.format.table_spec import (
    NAME_PATTERN,
    TableSpec,
    check_table,
    check_tables,
    check_weighted,
)
from embedserve_store.goldens.expected import Expected, read_expected
from embedserve_store.plans.plan import Plan
from embedserve_store.publishing.added_file import now
from embedserve_store.publishing.expected_answers import coverage_of, expected_goldens
from embedserve_store.publishing.options import PublishOptions, check_option_names
from embedserve_store.publishing.previous_version import check_layout, undamaged_before
from embedserve_store.publishing.publish_source import (
    Choice,
    ModelSource,
    choice_by_table,
    make_source,
    with_dtypes,
)
from embedserve_store.publishing.record_event import record_event
from embedserve_store.publishing.resolve_ids import resolve_ids
from embedserve_store.publishing.version_writer import (
    PublishedVersion,
    VersionContent,
    write_version,
)
from embedserve_store.remote.remote_store import RemoteStore, default_cache, is_url
from embedserve_store.remote.upload import upload_next
from embedserve_store.sources.description import Description, check_no_draft
from embedserve_store.transfer.receive import TransferProgress
from embedserve_store.writing.staging import check_room, check_writable, staging_folder

RESERVE_BYTES = 16 << 20
"""Bytes of free disk space required for goldens, plan and manifest, in addition to the tables and
id maps."""
META_MAX = 64
META_TEXT_MAX = 1000


def publish(
    source: ModelSource,
    store: str | os.PathLike[str],
    *,
    model: str,
    tables: Description | Sequence[TableSpec] | None = None,
    **options: Unpack[PublishOptions],
) -> PublishedVersion:
    """Publishes embedding tables as the next version of ``model``.

    A version for a remote store is published into the cache folder first, then uploaded.

    Args:
        source: an unsharded EmbeddingBagCollection or EmbeddingCollection, a model that holds one,
            the state dict of such a model, or the path of a checkpoint. A checkpoint is a folder of
            torch.distributed.checkpoint, a file of torch.save, or safetensors. Weights are float32,
            float16 or bfloat16, on any device. For a sharded module use publish_sharded.
        store: a folder, created if missing, or a URL such as s3://bucket/folder.
        tables: description of what a state dict or checkpoint does not hold, such as features and
            pooling. Required for these sources, not allowed for a module. Keys of a state dict end
            in ``embedding_bags.<table>.weight`` or ``embeddings.<table>.weight``.
        options: see `PublishOptions`.

    Raises:
        InvalidModelError: the model cannot be published. The store is unchanged.
        StoreError: the source cannot be read or the store cannot be written. The store is
            unchanged.
    """
    check_option_names(options)
    if isinstance(tables, Description) and not options.get("accept_draft"):
        check_no_draft(tables)
    content = make_content(source, model, tables, options)
    if (expected := options.get("expected")) is not None:
        content = _with_expected_goldens(content, expected, options.get("accept_unchecked", False))
    where = os.fspath(store)
    if where.split("/")[0].endswith(":") and not is_url(where):
        raise InvalidModelError(f"store is {where!r}: give a URL as a str, a Path loses a slash")
    content = _with_provenance(content, source, Path(where) / model, options.get("meta") or {})
    if not options.get("layout_changed"):
        check_layout(content.manifest, where)
    if options.get("if_changed"):
        content = replace(content, previous=undamaged_before(where, model))
    nbytes = content.manifest.nbytes + sum(one.nbytes for one in content.id_maps.values())
    published = publish_files(
        where,
        model,
        nbytes,
        lambda staging: write_version(content, staging),
        options.get("upload_progress"),
    )
    if published.is_new:
        checkpoint = str(published.manifest.source.get("checkpoint", ""))
        by = options.get("who")
        record_event(where, "publish", model, (published.version,), who=by, source=checkpoint)
    return published


def make_content(
    source: ModelSource,
    model: str,
    tables: Description | Sequence[TableSpec] | None,
    options: PublishOptions,
) -> VersionContent:
    """Builds a VersionContent after all checks that need no rows."""
    from embedserve_store.plans.planner import make_plan
    from embedserve_store.sources.checkpoint import check_rows

    described = tables if isinstance(tables, Description) else None
    vocabularies = {
        **(described.vocabularies if described else {}),
        **(options.get("vocabularies") or {}),
    }
    prefix, dtype = options.get("prefix", ""), options.get("dtype")
    made = make_source(source, tables, prefix, dtype, vocabularies)
    if (is_weighted := options.get("is_weighted")) is not None:
        made = replace(made, is_weighted=is_weighted)
    sharding = _requested_sharding(made.tables, options, described)
    _check_model_name(model)
    _check_description(made.tables, model, made.is_weighted)
    for table in made.tables:
        check_rows(table, made.rows[table.name])
    plan = make_plan(
        made.tables,
        sharding=sharding,
        world_size=options.get("world_size"),
        constraints=options.get("constraints"),
        device_memory_bytes=options.get("device_memory_bytes"),
        hosts=options.get("hosts"),
    )
    specs, id_maps = resolve_ids(made.tables, options.get("ids") or {}, vocabularies)
    _check_description(specs, model)
    goldens = FROM_TRAINING if made.ebc is not None else FROM_DESCRIPTION
    origin = provenance(made.kind) | {GOLDENS: goldens}
    manifest = Manifest(model, 0, specs, made.is_weighted, origin)
    return VersionContent(
        made, manifest, id_maps, plan, None, options.get("max_error"), options.get("progress")
    )


def _with_provenance(
    content: VersionContent, source: ModelSource, folder: Path, meta: Mapping[str, str]
) -> VersionContent:
    """Returns ``content`` with the checkpoint's path and ``meta`` added to its manifest."""
    if len(meta) > META_MAX:
        raise InvalidModelError(f"meta has {len(meta)} entries, the limit is {META_MAX}")
    for key, value in meta.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidModelError(f"meta {key!r:.80} is {value!r:.80}, expected strings")
        if not key or len(key) + len(value) > META_TEXT_MAX:
            raise InvalidModelError(
                f"meta {key[:80]!r}: expected a name and a value of together {META_TEXT_MAX} "
                "characters at most"
            )
    added: dict[str, Any] = {"meta": dict(meta)} if meta else {}
    if isinstance(source, str | os.PathLike):
        path = Path(source).absolute()
        if not path.is_relative_to(folder.absolute()):  # the shards of publish_sharded are inside
            added["checkpoint"] = str(path)
    manifest = content.manifest
    return replace(content, manifest=replace(manifest, source=manifest.source | added))


def _with_expected_goldens(
    content: VersionContent, given: str | os.PathLike[str] | Expected, accept_unchecked: bool
) -> VersionContent:
    """Returns ``content`` with the training model's outputs as goldens, after checking against
    them.

    Raises:
        StoreError: the file cannot be read.
        InvalidModelError: the outputs differ from the content's, or cannot verify it.
    """
    expected = given if isinstance(given, Expected) else read_expected(given)
    manifest, rows = content.manifest, content.source.rows
    goldens = expected_goldens(expected, manifest, rows, content.id_maps)
    coverage = coverage_of(expected, manifest, rows)
    if coverage.unchecked and not accept_unchecked:
        raise InvalidModelError(
            f"expected: {'; '.join(coverage.unchecked)}: use inputs that can tell, as "
            "write_expected makes them, or publish unchecked with --accept-unchecked "
            "(accept_unchecked=True)"
        )
    words = PARTLY_FROM_TRAINING if coverage.unchecked else FROM_TRAINING
    source = manifest.source | {GOLDENS: words, COMPARED: coverage.to_json()}
    manifest = replace(manifest, source=source)
    return replace(content, goldens=goldens, manifest=manifest, checksums=expected.checksums)


def publish_files(
    store: str,
    model: str,
    nbytes: int,
    write: Callable[[Path], PublishedVersion],
    upload_progress: TransferProgress | None,
    check: Callable[[PublishedVersion], None] | None = None,
) -> PublishedVersion:
    """Publishes the next version of ``model``, whose files ``write`` writes into a staging folder.

    A version for a remote store is published into the cache folder first, then uploaded.

    Args:
        nbytes: bytes of the rows and id maps, for which the disk must have room.
        write: writes all files and renames the folder (publish_staged).
        check: raises StoreError if the version must not appear any more. It is called after an
            upload, directly before the manifest is written; in a folder ``write`` has to check.

    Raises:
        StoreError: the store cannot be written. It is unchanged then.
    """
    if not is_url(store):
        return _publish_local(Path(store) / model, nbytes, write)
    remote = RemoteStore(store, default_cache())
    remote.next_version(model)  # fails before hours of writing if it cannot be read
    cache = default_cache() / "publish"
    with as_store_error(cache), staging_folder(cache) as folder:
        published = _publish_local(folder / model, nbytes, write)
        if not published.is_new:
            return replace(published, where=f"{store.rstrip('/')}/{model}/{published.version}")
        check_now = partial(check, published) if check is not None else None
        first = remote.next_version(model)
        number = upload_next(published.path, store, first, upload_progress, check_now)
    where = f"{store.rstrip('/')}/{model}/{number}"
    manifest = replace(published.manifest, version=number)
    return replace(published, where=where, version=number, manifest=manifest)


def _publish_local(
    folder: Path, nbytes: int, write: Callable[[Path], PublishedVersion]
) -> PublishedVersion:
    with as_store_error(folder):
        check_writable(folder)
        spare = f" ({nbytes:,} of rows and ids, and {RESERVE_BYTES:,} to spare)"
        check_room(folder, nbytes + RESERVE_BYTES, spare)
        with staging_folder(folder) as staging:
            return write(staging)


def check_options(
    tables: Sequence[TableSpec],
    store: str | os.PathLike[str],
    *,
    model: str,
    dtype: Choice,
    sharding: Choice | Plan,
    world_size: int | None,
    hosts: int | None = None,
) -> None:
    """Rejects, before training, options that ``publish`` would reject before it reads a weight.

    Changes nothing in the store.

    Raises:
        InvalidModelError, StoreError: as ``publish`` raises them.
    """
    from embedserve_store.plans.planner import make_plan

    described = with_dtypes(tuple(tables), dtype)
    _check_model_name(model)
    _check_description(described, model)
    make_plan(described, sharding=sharding, world_size=world_size, hosts=hosts)
    check_writable(Path(store) / model)


def _requested_sharding(
    tables: Sequence[TableSpec], options: PublishOptions, described: Description | None
) -> Choice | Plan:
    from embedserve_store.plans.planner_request import default_sharding

    sharding = options.get("sharding")
    if isinstance(sharding, Plan):
        return sharding
    types = described.sharding if described else {}
    if sharding is None:
        constraints = options.get("constraints") or {}
        return default_sharding(tables, types, constraints, options.get("hosts"))
    return {**types, **choice_by_table("sharding", tables, sharding)}


def _check_model_name(model: str) -> None:
    if not NAME_PATTERN.fullmatch(model):
        raise InvalidModelError(
            f"model name {model!r}: use letters, digits, '_', '-' and '.', "
            "and begin with a letter, digit or '_'"
        )


def _check_description(
    tables: tuple[TableSpec, ...], model: str, is_weighted: bool = False
) -> None:
    with checking_model():
        check_tables(tables, f"model {model!r}")
        check_weighted(tables, is_weighted, f"model {model!r}")
        for table in tables:
            check_table(table, f"table {table.name!r}")


def provenance(kind: str) -> dict[str, Any]:
    """Returns the first entries of Manifest.source, for a version that is published now."""
    return {
        "kind": kind,
        "published_at": now(),
        "versions": {name: _installed(name) for name in ("torch", "torchrec", "embedserve")},
    }


@cache
def _installed(package: str) -> str:
    """Returns the version of an installed package, whose description takes milliseconds to read."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@contextmanager
def as_store_error(folder: Path) -> Iterator[None]:
    """Converts errors to a StoreError with a one-line message."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise failed_write(f"{folder}: publishing failed", error) from error
    except Exception as error:
        raise StoreError(f"{folder}: publishing failed: {error!r}") from error
