"""The demo is trained once for all tests that ask it, and served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.demo_server import Demo
from running_servers import run_command, running


@pytest.fixture(scope="session")
def demo(
    made_once: Callable[[str, Callable[[Path], None]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Demo]:
    folder = made_once("demo", make_demo)
    with running(folder / "store", tmp_path_factory.mktemp("demo-server") / "log") as server:
        yield Demo(folder, server)


def make_demo(folder: Path) -> None:
    done = run_command("demo", folder / "store", "--checkpoint", folder / "demo.pt")
    assert done.returncode == 0, done.stderr
    assert "RMSE" in done.stderr
