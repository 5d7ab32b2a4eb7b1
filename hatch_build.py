"""Adds the client of the same version to the server's dependencies in pyproject.toml."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SameClient(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        client = f"embedserve-client=={metadata['version']}"
        metadata["dependencies"] = [client, *self.config["dependencies"]]
