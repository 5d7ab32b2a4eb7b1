"""How the demo's callers name things: movies by imdb_id, users by user_id, genres by name.

Hands build_demo the id rules and vocabularies to publish, and writes the same as the files that
`embedserve publish` reads. It never imports torch.
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
"""By table. Movies and users appear every day: who asks for a new one is not refused."""


def vocabularies(data: MovieTweetings) -> dict[str, dict[int, int] | dict[str, int]]:
    """By table, the row of each id."""
    return {"movie": data.movie_rows, "genre": data.genre_rows, "user": data.user_rows}


def write_description(data: MovieTweetings, tables: tuple[TableSpec, ...], path: Path) -> None:
    """Writes the YAML description ``path`` of ``tables``, and beside it a vocabulary for each:
    a text file of one id a line, whose line number, from 0, is the row.

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
