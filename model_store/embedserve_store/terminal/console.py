"""The console on stderr that commands write to, and its progress bars."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from embedserve_store.terminal.plain_console import plain_console
from embedserve_store.terminal.sanitize import sanitize
from embedserve_store.terminal.sizes import human_bytes

if TYPE_CHECKING:  # these modules import numpy, which most commands do not need
    from rich.progress import TaskID

    from embedserve_store import Progress as TableProgress
    from embedserve_store.transfer.receive import TransferProgress

console = plain_console(stderr=True)
BARS_MAX = 20
"""Progress bars that are shown, the last ones: they fit into a terminal. Each new bar draws all of
them, which for thousands of tables would take minutes."""


def say(line: str) -> None:
    """Prints a line for a person. It is never wrapped or coloured, so that it can be copied."""
    console.print(sanitize(line), soft_wrap=True)


def listed(names: Sequence[object]) -> str:
    """Returns names or numbers with commas between them, or "none"."""
    return ", ".join(map(str, names)) or "none"


def hush_torch() -> None:
    """Hides a torch hint that is meant for people who trace modules themselves."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


class _Bars:
    """Progress bars that appear with their first report, because an empty display would leave an
    empty line."""

    def __init__(self) -> None:
        # Takes a quarter of the start of a command; most commands show no bar.
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console)
        self._tasks: dict[str, TaskID] = {}

    def update(self, name: str, completed: int, total: int | None, done: str) -> None:
        self._progress.start()
        if name not in self._tasks:
            if len(self._tasks) == BARS_MAX:
                self._progress.remove_task(self._tasks.pop(next(iter(self._tasks))))
            self._tasks[name] = self._progress.add_task(name, total=total, done="")
        self._progress.update(self._tasks[name], completed=completed, total=total, done=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks:
            self._progress.stop()


@contextlib.contextmanager
def step_progress(what: str) -> Iterator[Callable[[int, int, float], None]]:
    """Shows a progress bar of training steps; yields progress(step, steps, loss)."""
    with _Bars() as bars:
        bars.update(what, 0, None, "")  # before the first step, which takes seconds
        yield lambda step, steps, loss: bars.update(what, step, steps, f"loss {loss:.3f}")


@contextlib.contextmanager
def table_progress() -> Iterator[TableProgress]:
    """Shows a progress bar of rows for each table, with the bytes of all tables so far and their
    rate. Yields progress(table, rows_done, rows_total, bytes_done)."""
    start: tuple[float, int] | None = None

    def report(table: str, rows_done: int, rows_total: int, bytes_done: int) -> None:
        nonlocal start
        now_s = time.monotonic()
        # The rate counts from the first report; the time before it went to imports.
        start = start or (now_s, bytes_done)
        done = f"{rows_done:,} of {rows_total:,} rows, {human_bytes(bytes_done)}"
        if now_s > start[0]:
            done += f", {human_bytes((bytes_done - start[1]) / (now_s - start[0]))}/s"
        bars.update(table, rows_done, rows_total, done)

    with _Bars() as bars:
        yield report


@contextlib.contextmanager
def transfer_progress() -> Iterator[TransferProgress]:
    """Shows a progress bar in bytes for each file; prints nothing if no file is transferred."""

    def report(file: str, bytes_done: int, bytes_total: int) -> None:
        done = f"{human_bytes(bytes_done)} of {human_bytes(bytes_total)}"
        bars.update(file, bytes_done, bytes_total, done)

    with _Bars() as bars:
        yield report
