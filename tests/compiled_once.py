"""Engines whose layouts are compiled once, for tests that are not about compilation.

Compiling a layout takes a second or more; restoring it with a compiled program takes some
hundredths of a second.
"""

from collections.abc import Sequence
from typing import Any

from embedserve.engine.compile import Program
from embedserve.engine.engine import Engine
from embedserve.engine.programs import Programs
from embedserve.engine.restore import restore
from embedserve_store import ModelVersion


class CompiledOnce:
    """Restores versions and keeps the programs of all their layouts; ``Programs`` keeps few."""

    def __init__(self) -> None:
        self._programs = Programs()
        self._kept: list[Sequence[Program | None]] = []

    def restore(self, version: ModelVersion, devices: str = "auto", **options: Any) -> Engine:
        """Calls ``restore`` with ``options`` and the kept programs, and returns its engine."""
        engine = restore(version, devices, programs=self._programs, **options)
        self.keep(engine)
        return engine

    def keep(self, engine: Engine) -> None:
        """Keeps the compiled programs of ``engine``."""
        self._programs.add(engine)
        self._kept.append([one.program for one in engine.compiled])
