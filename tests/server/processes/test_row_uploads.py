"""Tests of uploading the rows of new deltas in a thread, which a failure does not end."""

import threading
from typing import cast

import pytest

from embedserve.deltas.rows_reader import RowsReader
from embedserve.processes.row_uploads import uploading
from embedserve_store import StoreError

WAIT_S = 60


class Reader:
    """Stands for a RowsReader; fails in its first four uploads."""

    def __init__(self, *, uploads_rows: bool) -> None:
        self.uploads_rows = uploads_rows
        self.calls = 0
        self.is_over = threading.Event()

    def advance(self) -> None:
        self.calls += 1
        if self.calls <= 2:
            raise StoreError("no memory")
        if self.calls == 3:
            raise RuntimeError("CUDA error")
        if self.calls == 4:
            raise ValueError
        self.is_over.set()


class BrokenReader(Reader):
    """Fails in each upload."""

    def advance(self) -> None:
        self.calls += 1
        raise StoreError("another model")


def readers(*of: Reader | None) -> list[RowsReader | None]:
    return cast("list[RowsReader | None]", list(of))


def test_uploads_continue_after_errors(caplog: pytest.LogCaptureFixture) -> None:
    reader, on_cpu = Reader(uploads_rows=True), Reader(uploads_rows=False)
    broken = BrokenReader(uploads_rows=True)
    with uploading(readers(None, on_cpu, broken, reader)):
        assert reader.is_over.wait(WAIT_S)
    calls = reader.calls
    reasons = ("another model", "no memory", "CUDA error", "ValueError")
    assert caplog.messages == [f"changed rows do not reach the GPU: {one}" for one in reasons]
    assert broken.calls >= 5
    assert on_cpu.calls == 0
    assert not any(one.name == "row-uploads" for one in threading.enumerate())
    assert reader.calls == calls


def test_no_upload_thread_runs_if_lookups_read_host_memory() -> None:
    with uploading(readers(None, Reader(uploads_rows=False))):
        assert not any(one.name == "row-uploads" for one in threading.enumerate())
