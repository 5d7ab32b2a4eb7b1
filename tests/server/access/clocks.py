"""Clocks that tests set."""

from embedserve.access.clock import JumpTolerantClock


class Clocks:
    """The wall clock and the steady clock of a host."""

    def __init__(self, wall_s: float = 1_800_000_000.0) -> None:
        self.wall_s = wall_s
        self.steady_s = 100.0
        self.clock = JumpTolerantClock(lambda: self.wall_s, lambda: self.steady_s)

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds
