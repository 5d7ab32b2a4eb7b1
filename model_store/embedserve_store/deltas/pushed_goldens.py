"""Goldens that come with a push: those of rank 0, as a collective of all ranks.

Imports torch only when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from embedserve_store.deltas.encode_changes import RowsOfIds, copy_values
from embedserve_store.deltas.golden_bags import (
    GoldenBags,
    bags_of,
    check_bags,
    delta_goldens,
    trained_answers,
    with_row_numbers,
)
from embedserve_store.format.delta_goldens import DTYPES, DeltaGoldens
from embedserve_store.format.manifest import Manifest
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.parity import least_precise
from embedserve_store.publishing.rank_calls import RankCalls
from embedserve_store.publishing.ranks import Ranks

if TYPE_CHECKING:
    import torch


GivenGoldens = tuple[GoldenBags, Any]
"""Bags, and the results that they have."""


class PushedGoldens:
    """Makes the goldens of a delta, the same on all ranks."""

    def __init__(self, base: Manifest, ranks: Ranks) -> None:
        self._base, self._ranks, self._calls = base, ranks, RankCalls(ranks)

    def copied(self, goldens: GivenGoldens | None) -> GivenGoldens | None:
        """Returns copies of bags and results on the CPU, those of rank 0 alone."""
        if goldens is None or self._ranks.rank != 0:
            return None
        bags, answers = goldens
        return bags_of(bags, self._base), copy_values(answers)

    def given(
        self, goldens: Callable[[], GivenGoldens | None], rows_of: Mapping[str, RowsOfIds]
    ) -> DeltaGoldens | None:
        """Returns the given bags of callers' ids with their results; a collective.

        Args:
            goldens: returns bags and results, or raises.
            rows_of: functions that return the rows of ids after the delta, by table.
        """
        return self._calls.on_first(lambda: self._given(goldens(), rows_of))

    def looked_up(
        self, goldens: GoldenBags | None, module: torch.nn.Module, prefix: str, dtype: str
    ) -> DeltaGoldens | None:
        """Returns bags of row numbers with the results of the model in training; a collective,
        also over training's process group.

        Args:
            dtype: least precise dtype of this rank's shards.
        """
        if not self._ranks.is_on_first(goldens is not None):
            return None
        bags = self._calls.on_first(lambda: self._checked_bags(goldens))
        answers = self._calls.on_all(lambda: trained_answers(module, prefix, self._base, bags))
        least = least_precise(*self._ranks.from_all(dtype))
        return self._calls.on_first(lambda: delta_goldens(bags, answers, least, self._base))

    def _given(
        self, goldens: GivenGoldens | None, rows_of: Mapping[str, RowsOfIds]
    ) -> DeltaGoldens | None:
        if goldens is None:
            return None
        bags, answers = goldens
        numbers = with_row_numbers(bags_of(bags, self._base), self._base, rows_of)
        return delta_goldens(numbers, answers, DTYPES[0], self._base)

    def _checked_bags(self, goldens: GoldenBags) -> Bags:
        bags = bags_of(goldens, self._base)
        check_bags(bags, self._base)
        return bags
