"""Connections of these tests run on uvloop, as a router's do."""

from __future__ import annotations

from event_loop import event_loop_policy

__all__ = ["event_loop_policy"]
