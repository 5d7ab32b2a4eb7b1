"""Allowances: so many at once, more with time and for what asks something."""

from __future__ import annotations

import pytest

from embedserve.wire.http2.allowance import Allowance


@pytest.mark.parametrize("most", [1, 5])
def test_it_runs_out(most: int) -> None:
    allowance = Allowance(most, 0)
    assert [allowance.spend() for _ in range(most + 2)] == [True] * most + [False, False]


def test_time_fills_it_up_again_to_its_most() -> None:
    allowance = Allowance(3, 1e12)
    assert all(allowance.spend() for _ in range(1000))


def test_it_is_earned_to_its_most() -> None:
    allowance = Allowance(3, 0)
    for _ in range(3):
        assert allowance.spend()
    allowance.earn(2)
    assert [allowance.spend() for _ in range(3)] == [True, True, False]
    allowance.earn(100)
    assert [allowance.spend() for _ in range(4)] == [True, True, True, False]
