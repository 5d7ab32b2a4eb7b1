"""Calls functions on the ranks of a training job, so that all ranks have the same outcome.

Imports torch when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from embedserve_store.errors import StoreError
from embedserve_store.publishing.ranks import Ranks

Result = TypeVar("Result")


class RankCalls:
    """Collective calls, which raise on all ranks if they fail on one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def on_all(self, call: Callable[[], Result]) -> Result:
        """Calls ``call`` on every rank, and returns its result; a collective.

        If it raises on a rank, all ranks raise: their own error, else that of the first rank.
        """
        result, error = _outcome(call)
        errors = [one for one in self._ranks.from_all(error) if one is not None]
        return _checked(result, error or next(iter(errors), None))

    def on_first(self, call: Callable[[], Result]) -> Result:
        """Calls ``call`` on rank 0, and returns or raises its outcome on all; a collective."""
        first: tuple[Result | None, StoreError | None] = None, None
        if self._ranks.rank == 0:
            first = _outcome(call)
        first = self._ranks.from_first(first)
        return _checked(*first)


def _outcome(call: Callable[[], Result]) -> tuple[Result | None, StoreError | None]:
    """Returns the result of ``call``, or its error, which other ranks can receive."""
    try:
        return call(), None
    except StoreError as error:
        return None, error
    except Exception as error:
        other = StoreError(f"{type(error).__name__}: {error}")
        other.__cause__ = error
        return None, other


def _checked(result: Result | None, error: StoreError | None) -> Result:
    if error is not None:
        raise error
    return cast(Result, result)
