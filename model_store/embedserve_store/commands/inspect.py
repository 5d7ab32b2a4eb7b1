"""`embedserve inspect`: what a store, a model or a version holds, as tables for a person."""

from __future__ import annotations

from embedserve_store.commands.alias import settings_of
from embedserve_store.commands.plan_view import show_plan
from embedserve_store.errors import StoreError
from embedserve_store.format.coverage import Coverage
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.json_fields import typed
from embedserve_store.format.manifest import GOLDENS, Manifest
from embedserve_store.model_store import ModelStore
from embedserve_store.terminal.aligned_columns import grid, out, plain, show, write
from embedserve_store.terminal.sizes import human_bytes
from embedserve_store.transfer.stored_version import StoredVersion

TOTALS = ("tables", "rows", "bytes")


def inspect(path: str, model: str, version: str) -> None:
    """Prints the models of a store, the versions of a model or, with both, one version.

    Reads no rows and pulls nothing. Lists of a remote store show names and numbers alone.
    """
    store = ModelStore(path)
    if not model:
        _show_models(store)
    elif not version:
        _show_versions(store, model)
    else:
        stored = store.stored(model, version)
        _show_version(stored)
        _show_notes(store, stored)


def _show_models(store: ModelStore) -> None:
    totals = () if store.is_remote else TOTALS
    models = grid("model", "versions", *totals, numbers=totals)
    problems = []
    for name in store.models():
        numbers = ", ".join(map(str, store.versions(name)))
        known: tuple[str, ...] = ()
        if totals:
            try:
                known = _totals(store.load(name).manifest)
            except StoreError as error:
                problems.append(str(error))
        models.add_row(name, numbers, *known)
    if models.row_count:
        show(f"store {store.where}", models)
    else:
        write(f"store {store.where}: no models")
    _show_problems(problems)


def _show_versions(store: ModelStore, model: str) -> None:
    if store.is_remote:
        write(f"model {model}: versions {', '.join(map(str, store.versions(model)))}")
        _show_aliases(store, model)
        return
    numbers = ("version", *TOTALS, "ranks")
    versions = grid("version", *TOTALS, "published", "ranks", numbers=numbers)
    problems = []
    for number in store.versions(model):
        try:
            version = store.load(model, number)
        except StoreError as error:
            problems.append(str(error))
            versions.add_row(str(number))
            continue
        published = str(version.manifest.source.get("published_at", ""))
        ranks = str(version.plan.world_size)
        versions.add_row(str(number), *_totals(version.manifest), plain(published), ranks)
    show(f"model {model}", versions)
    _show_problems(problems)
    _show_aliases(store, model)


def _show_problems(problems: list[str]) -> None:
    """Prints why rows of a list are empty: a version is damaged, or not copied to its end."""
    for problem in problems:
        write(f"cannot be opened: {problem}")


def _show_aliases(store: ModelStore, model: str) -> None:
    for name, one in store.aliases(model).items():
        write(f"alias {name}: version {one.version}{settings_of(one)}")


def _totals(manifest: Manifest) -> tuple[str, str, str]:
    rows = sum(table.num_embeddings for table in manifest.tables)
    return str(len(manifest.tables)), f"{rows:,}", human_bytes(manifest.nbytes)


def _show_version(version: StoredVersion) -> None:
    manifest, plan = version.manifest, version.plan()
    columns = ("table", "rows", "dim", "dtype", "pooling", "bytes", "features", "ids")
    tables = grid(*columns, numbers=("rows", "dim", "bytes"))
    for table in manifest.tables:
        tables.add_row(
            table.name,
            f"{table.num_embeddings:,}",
            str(table.embedding_dim),
            table.dtype,
            table.pooling,
            human_bytes(table.nbytes),
            plain(", ".join(table.feature_names)),
            describe_ids(table.ids),
        )
    show(f"model {manifest.model} version {manifest.version}", tables)
    _show_source(manifest)
    out.print()
    show_plan(out, manifest.tables, plan)


def _show_notes(store: ModelStore, version: StoredVersion) -> None:
    notes = store.notes(version.model, version.number)
    if notes:
        out.print()
    for note in notes:
        write(f"note {note.when} {note.who}: {note.text}")


def _show_source(manifest: Manifest) -> None:
    """Prints a line for each known fact about the origin of a version."""
    source = manifest.source
    for name in ("published_at", "kind", "checkpoint", GOLDENS):
        if name in source:
            write(f"{name.replace('_', ' ')}: {source[name]}")
    for line in compared_lines(manifest):
        write(line)
    where = f"model {manifest.model} version {manifest.version}: source"
    for key, value in typed({"meta": {}} | source, "meta", dict, where).items():
        write(f"{key}: {value}")


def compared_lines(manifest: Manifest) -> list[str]:
    """Returns lines on which parts of a version were compared with the training model's answers,
    and which were not. Returns no lines if the manifest does not record it.

    Raises:
        StoreError: the manifest records it in another format than a publisher writes.
    """
    where = f"model {manifest.model} version {manifest.version}"
    coverage = Coverage.from_source(manifest.source, where)
    if coverage is None:
        return []
    counts = ", ".join(
        f"{coverage.rows.get(table.name, 0):,} of {table.num_embeddings:,} of {table.name}"
        for table in manifest.tables
    )
    examples = f"{coverage.examples} examples"
    lines = [f"compared with the training model's answers: {examples}, rows: {counts}"]
    if coverage.pooling:
        words = ", ".join(f"{key} {pooling}" for key, pooling in coverage.pooling.items())
        lines.append(f"pooling compared: {words}")
    if coverage.unchecked:
        lines.append(f"not compared: {'; '.join(coverage.unchecked)}")
    return lines


def describe_ids(rule: IdRule) -> str:
    """Returns a short description of a table's id rule.

    >>> describe_ids(IdRule(rule="map", entries=20, unknown="row", default_row=7))
    'map of 20 int64, unknown: row 7'
    """
    if rule.rule == "modulo":
        return f"modulo {rule.modulus}" + (f" + {rule.offset}" if rule.offset else "")
    known = rule.rule if rule.rule == "rows" else f"map of {rule.entries:,} {rule.id_type}"
    if rule.unknown == "error":
        return known
    return f"{known}, unknown: {rule.unknown}" + (
        f" {rule.default_row}" if rule.unknown == "row" else ""
    )
