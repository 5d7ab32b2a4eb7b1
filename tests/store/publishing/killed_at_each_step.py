"""Publishes and moves an alias repeatedly, and kills each run one step later than the last run.

    python killed_at_each_step.py FOLDER

A step is an event of Python's audit hooks with a path in the store: a file is opened, created,
linked, renamed or removed. After each kill a reader checks the store. Every version that it lists
is whole, the alias has its old or its new version, and the next writer succeeds. Prints the number
of steps.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from store.one_table import publish_versions

from embedserve_store import ModelStore, set_alias, verify


def kill_at(step: int, folder: Path) -> None:
    """Makes this process kill itself when it begins its ``step``-th step in ``folder``."""
    left = step

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event != "open" and not event.startswith("os."):
            return
        paths = [os.fspath(one) for one in arguments if isinstance(one, str | os.PathLike)]
        if any(str(path).startswith(str(folder)) for path in paths):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def steps(act: Callable[[Path], object], check: Callable[[Path], None], begin: Path) -> int:
    """Kills ``act`` at each of its steps, each time on a new copy of the store ``begin``, and then
    checks the copy. Returns the number of steps."""
    step = 0
    while True:
        step += 1
        store = shutil.copytree(begin, begin.with_name("store"))
        child = os.fork()
        if not child:
            kill_at(step, store)
            act(store)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        check(store)
        act(store)
        check(store)
        left = [path for path in (store / "m").iterdir() if path.name.startswith(".")]
        assert left == [], left
        shutil.rmtree(store)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, status
            return step - 1


def move(store: Path) -> object:
    return set_alias(store, "m", "stable", max(ModelStore(store).versions("m")))


def check_versions(store: Path) -> None:
    versions = ModelStore(store).versions("m")
    assert versions == list(range(1, len(versions) + 1)), versions
    for number in versions:
        verify(ModelStore(store).load("m", number))


def check_alias(store: Path) -> None:
    check_versions(store)
    assert ModelStore(store).load("m", "stable").manifest.version in (1, 2)


def main() -> None:
    begin = Path(sys.argv[1]) / "begin"
    torch.set_num_threads(1)
    publish_versions(begin)  # also imports everything before the forks
    print("publish", steps(publish_versions, check_versions, begin))
    set_alias(begin, "m", "stable", 1)
    publish_versions(begin)
    print("alias", steps(move, check_alias, begin))


if __name__ == "__main__":
    main()
