"""The demo is trained, and served, once for all tests that ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.demo_server import Demo
from running_servers import run_command, running


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("demo")
    done = run_command("demo", folder / "store", "--checkpoint", folder / "demo.pt")
    assert done.returncode == 0, done.stderr
    assert "RMSE" in done.stderr
    with running(folder / "store", folder / "log") as server:
        yield Demo(folder, server)
