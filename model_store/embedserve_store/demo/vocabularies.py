"""Defines the ids of the demo's callers: imdb_id for movies, user_id for users, names for genres.

Provides the id rules and vocabularies that build_demo publishes, and writes them as files for
`embedserve publish`. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path

from embedserve_store.demo.data import MovieTweetings
from embedserve_store.errors import StoreError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import TableSpec

RULES = {
    "movie": IdRule(rule="map", unknown="skip"),
    "genre": IdRule(rule="map", id_type="string"),
    "user": IdRule(rule="map", unknown="skip"),
}
"""Id rules by table name. Movies and users are added daily, so unknown ids are skipped."""


def vocabularies(data: MovieTweetings) -> dict[str, dict[int, int] | dict[str, int]]:
    """Returns, by table name, the row of each id."""
    return {"movie": data.movie_rows, "genre": data.genre_rows, "user": data.user_rows}


def write_description(data: MovieTweetings, tables: tuple[TableSpec, ...], path: Path) -> None:
    """Writes the YAML description ``path`` of ``tables``, and a vocabulary file for each table.

    A vocabulary is a text file with one id per line, beside ``path``. The line number, from 0, is
    the row.

    Raises:
        StoreError: a file cannot be written.
    """
    lines = ["tables:"]
    try:
        for table in tables:
            vocabulary = path.with_name(f"{path.stem}.{table.name}.txt")
            ids = vocabularies(data)[table.name]
            vocabulary.write_text("".join(f"{one}\n" for one in ids), encoding="utf-8")
            lines += _table_lines(table, vocabulary.name)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def _table_lines(table: TableSpec, vocabulary: str) -> list[str]:
    rule = RULES[table.name]
    ids = f"rule: map, id_type: {rule.id_type}, unknown: {rule.unknown}"
    return [
        f"  - name: {table.name}",
        f"    num_embeddings: {table.num_embeddings}",
        f"    embedding_dim: {table.embedding_dim}",
        f"    feature_names: [{', '.join(table.feature_names)}]",
        f"    pooling: {table.pooling}",
        f"    ids: {{{ids}, vocabulary: {vocabulary}}}",
    ]
