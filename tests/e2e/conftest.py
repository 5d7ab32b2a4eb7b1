"""Fixtures of the demo: trained and served once for all tests that use it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.demo_server import Demo, make_demo
from running_servers import running


@pytest.fixture(scope="session")
def demo(
    made_once: Callable[[str, Callable[[Path], None]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Demo]:
    folder = made_once("demo", make_demo)
    log = tmp_path_factory.mktemp("demo-server") / "log"
    labels = folder / "store" / "movies.labels.json"
    with running(folder / "store", log, "--labels", labels) as server:
        yield Demo(folder, server)
