"""Puts the wire contract, which the repository keeps beside the clients, into wheel and sdist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WithProto(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Does nothing in an unpacked sdist, which has the contract as a package of its own. An
        editable install finds it by dev-mode-dirs."""
        proto = Path(self.root).parent / "proto" / "embedserve_proto"
        if version != "editable" and proto.is_dir():
            build_data["force_include"][str(proto)] = "embedserve_proto"
