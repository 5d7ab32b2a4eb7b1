"""Fixtures of the wire tests: the servers run on uvloop, as they do for users."""

from event_loop import event_loop_policy

__all__ = ["event_loop_policy"]
