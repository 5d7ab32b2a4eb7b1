"""Tests of the clock: a jump is logged, and counts only after it has lasted."""

import pytest
from server.access.clocks import Clocks

from embedserve.access.clock import LASTS_S

START_S = 1_800_000_000.0


def test_clock_follows_a_drifting_host_clock() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.pass_s(1)
        clocks.wall_s += 0.5
        clocks.clock.refresh()
    assert clocks.clock.now_s() == START_S + 150


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0, 30.0])
def test_clock_jump_is_logged_and_adopted_once_it_lasts(
    jump_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    clocks = Clocks()
    clocks.wall_s += jump_s
    for second in range(int(LASTS_S)):
        clocks.clock.refresh()
        assert clocks.clock.now_s() == START_S + second
        clocks.pass_s(1)
    assert [one.getMessage().split(":")[0] for one in caplog.records] == [
        f"the host's clock has jumped by {jump_s:.0f} s"
    ]
    clocks.clock.refresh()
    assert clocks.clock.now_s() == START_S + LASTS_S + jump_s
    clocks.clock.refresh()
    assert "goes by it" in caplog.records[-1].getMessage()


def test_reverted_clock_jump_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Covers a second jump as far, which has yet to last, although the first one was long ago."""
    clocks = Clocks()
    for jump_s in (3600, -3600, 3600, -3600):
        clocks.wall_s += jump_s
        for _ in range(100):
            clocks.pass_s(1)
            clocks.clock.refresh()
    assert clocks.clock.now_s() == START_S + 400
    messages = [one.getMessage() for one in caplog.records]
    assert ["back where it was" in message for message in messages] == [False, True, False, True]
