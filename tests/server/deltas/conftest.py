"""Fixtures of the tests of deltas: a version, its live rows and a reader; and a followed line."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from server.deltas.tables import version_of

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve_store import ModelVersion

if TYPE_CHECKING:
    from server.deltas.followed import Followed


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    return version_of(tmp_path_factory.mktemp("live"))


@pytest.fixture
def live(version: ModelVersion) -> LiveRows:
    return LiveRows(version, 64 << 10, readers=2)


@pytest.fixture
def reader(live: LiveRows, version: ModelVersion) -> RowsReader:
    return RowsReader(live, 0, version.plan)


@pytest.fixture
def followed(tmp_path: Path) -> "Followed":
    from server.deltas.followed import Followed  # imports torch, which not all tests here need

    return Followed(tmp_path / "store")
