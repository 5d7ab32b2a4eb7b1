"""Ids that a load test requests for a feature, drawn from a Zipf distribution.

A feature's ids are ranked by popularity. Rank 0 is the most popular, and the probability of a rank
falls with rank ** -exponent. Popular ids are spread over the table, so that their rows are not
adjacent. Knows id rules and vocabularies; sends nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_client import ModelInfo, TableInfo

COUNT_MAX = 2**31
"""Distinct ids of one feature, at most. The product of a rank and a step then still fits in
int64."""


@dataclass(frozen=True)
class FeatureIds:
    """Ids of one feature: the numbers 0 to count - 1, or the ids of a vocabulary.

    Attributes:
        vocabulary: int64 or str objects [count]; None if an id is its number.
        is_known: whether the table has these ids, according to the server.
    """

    count: int
    vocabulary: NDArray[Any] | None = None
    is_known: bool = True

    def draw(self, random: np.random.Generator, size: int, exponent: float) -> NDArray[Any]:
        """Draws ``size`` ids, int64 or str objects."""
        numbers = spread(zipf_ranks(random, size, self.count, exponent), self.count)
        return numbers if self.vocabulary is None else self.vocabulary[numbers]


def zipf_ranks(
    random: np.random.Generator, size: int, count: int, exponent: float
) -> NDArray[np.int64]:
    """Draws ranks from 0 to count - 1, int64 [size]; an exponent of 0 is uniform.

    Inverts the integral of x ** -exponent from 1 to count + 1, and truncates to a whole rank. Time
    and memory therefore do not depend on count.
    """
    uniform = random.random(size)
    if exponent == 1:
        place = (count + 1.0) ** uniform
    else:
        power = 1 - exponent
        place = (((count + 1.0) ** power - 1) * uniform + 1) ** (1 / power)
    return np.clip(place.astype(np.int64) - 1, 0, count - 1)


def spread(ranks: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Permutes the numbers 0 to count - 1, so that adjacent ranks are far apart."""
    step = max(1, round(count * 0.618))
    while gcd(step, count) != 1:
        step += 1
    return ranks * step % count


def ids_by_feature(
    model: ModelInfo, vocabularies: Mapping[str, Sequence[str]]
) -> dict[str, FeatureIds]:
    """Returns the ids of each feature whose ids are known or can be guessed.

    A feature is left out if its table rejects unknown ids, the server lists no examples of them,
    and no vocabulary is given. Raises ValueError if a vocabulary names no table or has ids of
    another type.

    Args:
        vocabularies: ids by table, as text.
    """
    for table in vocabularies:
        if table not in {one.name for one in model.tables}:
            raise ValueError(f"--vocabularies: {model.model!r} has no table {table!r}")
    found = {feature: _ids_of(feature, model, vocabularies) for feature in model.features}
    return {feature: ids for feature, ids in found.items() if ids is not None}


def read_vocabularies(option: str) -> dict[str, list[str]]:
    """Reads the files in "TABLE=FILE,TABLE=FILE", with one id per line. Raises ValueError for a
    wrong option, and OSError for an unreadable file."""
    vocabularies = {}
    for part in filter(None, option.split(",")):
        table, equals, path = part.partition("=")
        if not equals or not table or not path:
            raise ValueError(f"--vocabularies: {part!r} is not TABLE=FILE")
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        vocabularies[table] = lines[:-1] if lines[-1] == "" else lines
        if not vocabularies[table]:
            raise ValueError(f"--vocabularies: {path} is empty")
    return vocabularies


def _ids_of(
    feature: str, model: ModelInfo, vocabularies: Mapping[str, Sequence[str]]
) -> FeatureIds | None:
    """Returns ids that suit every table of the feature. Prefers listed ids, then the smallest
    set."""
    tables = [table for table in model.tables if feature in table.features]
    choices = [_ids_of_table(table, vocabularies.get(table.name)) for table in tables]
    usable = [choice for choice in choices if choice is not None]
    if not tables or len(usable) < len(choices):
        return None
    return min(usable, key=lambda choice: (choice.vocabulary is None, choice.count))


def _ids_of_table(table: TableInfo, lines: Sequence[str] | None) -> FeatureIds | None:
    rule = table.ids
    if lines is not None:
        return _listed(table, lines)
    if rule.rule == "modulo":
        return FeatureIds(min(rule.modulus, COUNT_MAX))
    if rule.rule == "rows":
        return FeatureIds(min(table.num_embeddings, COUNT_MAX))
    if rule.examples:
        return _listed(table, rule.examples)
    if rule.unknown == "error" or rule.id_type == "string":
        return None
    return FeatureIds(min(rule.entries, COUNT_MAX), is_known=False)


def _listed(table: TableInfo, lines: Sequence[str]) -> FeatureIds:
    if table.ids.id_type == "string":
        return FeatureIds(len(lines), np.array(lines, dtype=object))
    try:
        return FeatureIds(len(lines), np.array([int(line) for line in lines], dtype=np.int64))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"--vocabularies: {table.name!r} takes int64 ids: {error}") from error
