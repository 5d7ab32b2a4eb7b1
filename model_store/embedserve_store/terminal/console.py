"""The console on stderr that commands write to, and its progress bars."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from embedserve_store import Progress as TableProgress
from embedserve_store.terminal.sanitize import sanitize
from embedserve_store.terminal.sizes import human_bytes

console = Console(stderr=True)


def say(line: str) -> None:
    """Prints a line for a person. It is never wrapped or coloured, so that it can be copied."""
    console.print(sanitize(line), soft_wrap=True, highlight=False, markup=False)


def hush_torch() -> None:
    """Hides a torch hint that is meant for people who trace modules themselves."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@contextlib.contextmanager
def step_progress(what: str) -> Iterator[Callable[[int, int, float], None]]:
    """Shows a progress bar of training steps; yields progress(step, steps, loss)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(what, total=None, loss="")

        def report(step: int, steps: int, loss: float) -> None:
            progress.update(task, completed=step, total=steps, loss=f"loss {loss:.3f}")

        yield report


@contextlib.contextmanager
def table_progress() -> Iterator[TableProgress]:
    """Shows a progress bar of rows for each table, with the bytes of all tables so far and their
    rate. Yields progress(table, rows_done, rows_total, bytes_done)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"))
    progress = Progress(*columns, TimeRemainingColumn(), console=console)
    tasks: dict[str, TaskID] = {}
    start: tuple[float, int] | None = None

    def report(table: str, rows_done: int, rows_total: int, bytes_done: int) -> None:
        nonlocal start
        progress.start()  # not earlier: without a row it would leave an empty line
        if table not in tasks:
            tasks[table] = progress.add_task(table, total=rows_total, done="")
        now_s = time.monotonic()
        # The rate counts from the first report; the time before it went to imports.
        start = start or (now_s, bytes_done)
        done = f"{rows_done:,} of {rows_total:,} rows, {human_bytes(bytes_done)}"
        if now_s > start[0]:
            done += f", {human_bytes((bytes_done - start[1]) / (now_s - start[0]))}/s"
        progress.update(tasks[table], completed=rows_done, done=done)

    try:
        yield report
    finally:
        if tasks:
            progress.stop()
