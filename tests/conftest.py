"""Training runs, which take seconds: each once for all folders that read what it saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from trained import Trained, train


@pytest.fixture(scope="session")
def trained_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Trained]:
    """trained_by(2): what two processes trained. Its files are not to be changed."""
    return cache(lambda world_size: train(tmp_path_factory.mktemp("trained"), world_size))
