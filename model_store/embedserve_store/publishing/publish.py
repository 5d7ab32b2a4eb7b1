"""Publishes a model: checks it, plans its shards, has it written, and reports.

``publish`` takes a live module, a state dict or a checkpoint; publish_source.py makes one Source
of any of them, and from there all go the same way. Whatever fails, no version appears and nothing
is left behind. Imports torch only when called.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.coverage import COMPARED
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.layout import layout_changes
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
from embedserve_store.format.tables_file import Progress
from embedserve_store.goldens.expected import Expected, read_expected
from embedserve_store.model_store import ModelStore
from embedserve_store.plans.plan import Plan
from embedserve_store.publishing.expected_answers import coverage_of, expected_goldens
from embedserve_store.publishing.publish_source import (
    Choice,
    ModelSource,
    choice_by_table,
    make_source,
    with_dtypes,
)
from embedserve_store.publishing.resolve_ids import Vocabularies, resolve_ids
from embedserve_store.publishing.version_writer import (
    Draft,
    PublishedVersion,
    Source,
    write_version,
)
from embedserve_store.remote.remote_files import TransferProgress, UnreachableError
from embedserve_store.remote.remote_store import RemoteStore, default_cache, is_url
from embedserve_store.remote.upload import upload_version
from embedserve_store.sources.description import Description, check_no_draft
from embedserve_store.writing.staging import check_room, check_writable, staging_folder

if TYPE_CHECKING:
    from embedserve_store.plans.planner import Constraints

SMALL_FILES_BYTES = 16 << 20
"""Room asked for beside the tables: goldens, plan, manifest."""
META_MAX = 64
META_TEXT_MAX = 1000


def publish(
    source: ModelSource,
    store: str | os.PathLike[str],
    *,
    model: str,
    tables: Description | Sequence[TableSpec] | None = None,
    prefix: str = "",
    is_weighted: bool | None = None,
    dtype: Choice | None = None,
    ids: Mapping[str, IdRule] | None = None,
    vocabularies: Vocabularies | None = None,
    sharding: Choice | Plan | None = None,
    world_size: int | None = None,
    constraints: Constraints | None = None,
    device_memory_bytes: int | None = None,
    max_error: float | None = None,
    expected: str | os.PathLike[str] | Expected | None = None,
    accept_unchecked: bool = False,
    accept_draft: bool = False,
    layout_changed: bool = False,
    meta: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    upload_progress: TransferProgress | None = None,
) -> PublishedVersion:
    """Publishes embedding tables as the next version of ``model``.

    Into a remote store it is published in a temporary folder first, then uploaded.

    Args:
        source: an unsharded EmbeddingBagCollection or EmbeddingCollection, a model that holds one,
            the state dict of such a model, or the path of a checkpoint: a folder of
            torch.distributed.checkpoint, a file of torch.save, or safetensors. Weights are
            float32, float16 or bfloat16, on any device. For a sharded module: publish_sharded.
        store: a folder, made if missing, or a URL such as s3://bucket/folder.
        tables: what a state dict or checkpoint does not hold (features, pooling); required for
            them, left out for a module. A state dict's keys end in
            ``embedding_bags.<table>.weight`` or ``embeddings.<table>.weight``.
        prefix: where there are several collections, the dotted path of one from the beginning of
            the keys (of a module: of its state dict's), of what holds it alone, or "." for the top.
        is_weighted: whether callers pass weights; None as the module or description says.
        dtype: what rows are stored as: float32, float16, int8 or int4, for all tables or by
            table; None as the tables say, which is float32 unless they say otherwise.
        ids: by table, how callers' ids become rows; a table that is not here keeps its own rule.
        vocabularies: by table, for the rule "map" (which they imply): a file, an int64 array or
            a sequence of ids (position is the row), or a mapping from id to row.
        sharding: table_wise, row_wise, column_wise, data_parallel or auto, for all tables or by
            table, or a whole Plan; None as the description says, else what the constraints allow,
            else table_wise.
        world_size: ranks to plan for; None for 1, or the Plan's.
        constraints: by table, as torchrec's ParameterConstraints.
        device_memory_bytes: of each rank, which the plan must fit.
        max_error: refuse where a table's pooled answers have a larger relative L2 error.
        expected: what write_expected wrote of the training model, or a file like it: its answers
            must be those of the source's rows, as they are described, and become the goldens.
        accept_unchecked: publish also where the inputs of ``expected`` cannot tell whether a
            feature is described rightly: none has an id of it, or no bag has two.
        accept_draft: publish what `embedserve describe` guessed and nobody has checked.
        layout_changed: publish also what callers of the version before would notice: other keys,
            order, widths, tables, pooling, id rules or weights.
        meta: kept in the manifest, such as the id of the training's run.
        progress: called as rows are written.
        upload_progress: called as files travel to a remote store.

    Raises:
        InvalidModelError: the model cannot be published; the store was not touched, or is as
            it was before.
        StoreError: the source cannot be read or the store written; it is as it was before.
    """
    described = tables if isinstance(tables, Description) else None
    if described is not None and not accept_draft:
        check_no_draft(described)
    made = make_source(source, tables, prefix, dtype)
    if is_weighted is not None:
        made = replace(made, is_weighted=is_weighted)
    draft = make_draft(
        made,
        model,
        ids=ids or {},
        vocabularies={**(described.vocabularies if described else {}), **(vocabularies or {})},
        sharding=_wanted_sharding(made.tables, sharding, described, constraints or {}),
        world_size=world_size,
        constraints=constraints,
        device_memory_bytes=device_memory_bytes,
    )
    if expected is not None:
        draft = _held_to(draft, expected, accept_unchecked)
    draft = replace(draft, max_error=max_error, progress=progress)
    where = os.fspath(store)
    if where.split("/")[0].endswith(":") and not is_url(where):
        raise InvalidModelError(f"store is {where!r}: give a URL as a str, a Path loses a slash")
    draft = _with_provenance(draft, source, Path(where) / model, meta or {})
    if not layout_changed:
        _check_layout(draft.manifest, where)
    if is_url(where):
        return _publish_remote(draft, where, upload_progress)
    return _publish(draft, Path(where) / model)


def make_draft(
    source: Source,
    model: str,
    *,
    ids: Mapping[str, IdRule],
    vocabularies: Vocabularies,
    sharding: Choice | Plan,
    world_size: int | None,
    constraints: Constraints | None,
    device_memory_bytes: int | None,
) -> Draft:
    """Checks everything that can be known before a row is read."""
    from embedserve_store.plans.planner import make_plan
    from embedserve_store.sources.checkpoint import check_rows

    _check_model_name(model)
    _check_description(source.tables, model, source.is_weighted)
    for table in source.tables:
        check_rows(table, source.rows[table.name])
    plan = make_plan(
        source.tables,
        sharding=sharding,
        world_size=world_size,
        constraints=constraints,
        device_memory_bytes=device_memory_bytes,
    )
    tables, id_maps = resolve_ids(source.tables, ids, vocabularies)
    _check_description(tables, model)
    provenance = _provenance(source.kind) | {
        GOLDENS: FROM_TRAINING if source.ebc is not None else FROM_DESCRIPTION
    }
    manifest = Manifest(model, 0, tables, source.is_weighted, provenance)
    return Draft(source, manifest, id_maps, plan, None, None, None)


def _with_provenance(
    draft: Draft, source: ModelSource, folder: Path, meta: Mapping[str, str]
) -> Draft:
    """``draft`` whose manifest says where its checkpoint lay, and ``meta``."""
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
    said: dict[str, Any] = {"meta": dict(meta)} if meta else {}
    if isinstance(source, str | os.PathLike):
        path = Path(source).absolute()
        if not path.is_relative_to(folder.absolute()):  # as the shards of publish_sharded do
            said["checkpoint"] = str(path)
    manifest = draft.manifest
    return replace(draft, manifest=replace(manifest, source=manifest.source | said))


def _held_to(
    draft: Draft, given: str | os.PathLike[str] | Expected, accept_unchecked: bool
) -> Draft:
    """``draft`` with the training model's answers as goldens.

    Raises:
        StoreError: the file cannot be read.
        InvalidModelError: they are not those of the draft, or could not tell.
    """
    expected = given if isinstance(given, Expected) else read_expected(given)
    manifest, rows = draft.manifest, draft.source.rows
    goldens = expected_goldens(expected, manifest, rows, draft.id_maps)
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
    return replace(draft, goldens=goldens, manifest=manifest, checksums=expected.checksums)


def _check_layout(manifest: Manifest, store: str) -> None:
    """Raises InvalidModelError where the layout is another than that of the version before, and
    where that cannot be told."""
    model = manifest.model
    try:
        before = _version_before(store, model)
    except UnreachableError:
        raise
    except StoreError as error:
        raise InvalidModelError(
            f"the version before cannot be compared ({error}): publish without that by "
            "--layout-changed (layout_changed=True)"
        ) from error
    if before is not None and (changes := layout_changes(before, manifest)):
        raise InvalidModelError(
            f"model {model!r} has another layout than version {before.version}: "
            f"{'; '.join(changes)}: if callers know, publish it with --layout-changed "
            "(layout_changed=True)"
        )


def _version_before(store: str, model: str) -> Manifest | None:
    if not is_url(store) and not (Path(store) / model).is_dir():
        return None
    models = ModelStore(store)
    return models.manifest(model) if models.versions(model) else None


def _publish_remote(
    draft: Draft, url: str, upload_progress: TransferProgress | None
) -> PublishedVersion:
    model = draft.manifest.model
    number = RemoteStore(url, default_cache()).next_version(model)
    with tempfile.TemporaryDirectory(prefix="embedserve-") as folder:
        published = _publish(draft, Path(folder) / model)
        where = upload_version(published.path, url, number, upload_progress)
    manifest = replace(published.manifest, version=number)
    return replace(published, where=where, version=number, manifest=manifest)


def _publish(draft: Draft, folder: Path) -> PublishedVersion:
    maps_bytes = sum(one.nbytes for one in draft.id_maps.values())
    with as_store_error(folder):
        check_writable(folder)
        needed_bytes = draft.manifest.nbytes + maps_bytes
        spare = f" ({needed_bytes:,} of rows and ids, and {SMALL_FILES_BYTES:,} to spare)"
        check_room(folder, needed_bytes + SMALL_FILES_BYTES, spare)
        with staging_folder(folder) as staging:
            return write_version(draft, staging)


def check_options(
    tables: Sequence[TableSpec],
    store: str | os.PathLike[str],
    *,
    model: str,
    dtype: Choice,
    sharding: Choice | Plan,
    world_size: int | None,
) -> None:
    """Refuses what ``publish`` would refuse before it reads a weight, so that a trainer can ask
    before it trains; touches nothing.

    Raises:
        InvalidModelError, StoreError: as ``publish``.
    """
    from embedserve_store.plans.planner import make_plan

    described = with_dtypes(tuple(tables), dtype)
    _check_model_name(model)
    _check_description(described, model)
    make_plan(described, sharding=sharding, world_size=world_size)
    check_writable(Path(store) / model)


def _wanted_sharding(
    tables: Sequence[TableSpec],
    sharding: Choice | Plan | None,
    described: Description | None,
    constraints: Constraints,
) -> Choice | Plan:
    from embedserve_store.plans.planner_request import default_sharding

    if isinstance(sharding, Plan):
        return sharding
    if sharding is None:
        return default_sharding(tables, described.sharding if described else {}, constraints)
    return choice_by_table("sharding", tables, sharding)


def _check_model_name(model: str) -> None:
    if not NAME_PATTERN.fullmatch(model):
        raise InvalidModelError(
            f"model name {model!r}: use letters, digits, '_', '-' and '.', "
            "and begin with a letter, digit or '_'"
        )


def _check_description(
    tables: tuple[TableSpec, ...], model: str, is_weighted: bool = False
) -> None:
    try:
        check_tables(tables, f"model {model!r}")
        check_weighted(tables, is_weighted, f"model {model!r}")
        for table in tables:
            check_table(table, f"table {table.name!r}")
    except StoreError as error:
        raise InvalidModelError(str(error)) from error


def _provenance(kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "published_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: _installed(name) for name in ("torch", "torchrec", "embedserve")},
    }


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@contextmanager
def as_store_error(folder: Path) -> Iterator[None]:
    """Says in one line what stopped the publisher, also when its user did."""
    try:
        yield
    except StoreError:
        raise
    except KeyboardInterrupt as error:
        raise StoreError(f"{folder}: publishing was interrupted") from error
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        reason = error.strerror or error
        raise StoreError(f"{folder}: publishing failed: {reason}{file}") from error
    except Exception as error:
        raise StoreError(f"{folder}: publishing failed: {error!r}") from error
