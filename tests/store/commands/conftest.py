"""Fixture: a store for the commands to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from server.small_store import TWO_RANKS, publish_small_model


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_small_model(tmp_path_factory.mktemp("store"), *TWO_RANKS)
