"""Tests of written files: the bytes are on disk, whole and in order, with and without direct
writes."""

import errno
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.publishing.tables_writer import write_tables
from embedserve_store.writing import direct_file
from embedserve_store.writing.direct_file import BUFFER_BYTES, new_file


@pytest.fixture(autouse=True)
def use_direct_writes_for_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "DIRECT_BYTES_MIN", 1)


@pytest.mark.parametrize(
    "sizes",
    [
        (5,),
        (4096, 0, 1),
        (BUFFER_BYTES,),
        (BUFFER_BYTES - 1, 2, 3 * BUFFER_BYTES + 7),
        (10, 2 * BUFFER_BYTES, 4096),
    ],
)
def test_chunks_of_any_size_are_written_in_order(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    pieces = [random.integers(0, 256, size, np.uint8) for size in sizes]
    with new_file(tmp_path / "f", sum(sizes)) as file:
        for piece in pieces:
            file.write(piece.data)
    assert (tmp_path / "f").read_bytes() == np.concatenate(pieces).tobytes()


def test_direct_and_buffered_writes_produce_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableSpec("t", 50_000, 128, ("t",), "sum", "float32")
    rows = np.random.default_rng(1).integers(0, 256, (table.num_embeddings, 512), np.uint8)

    def write(name: str) -> dict[str, str]:
        return write_tables(tmp_path / name, (table,), lambda _: np.split(rows, 10))

    direct = write("direct")
    monkeypatch.setattr(direct_file, "DIRECT_BYTES_MIN", 1 << 60)
    assert write("usual") == direct
    assert (tmp_path / "usual").read_bytes() == (tmp_path / "direct").read_bytes()
    np.testing.assert_array_equal(TablesFile.open(tmp_path / "direct", (table,)).rows("t"), rows)


def test_file_system_without_o_direct_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tmpfs before Linux 6.6 is such a file system: it creates the file and then rejects it."""
    real = os.open

    def reject_direct(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, *mode))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", reject_direct)
    with new_file(tmp_path / "f", 3) as file:
        file.write(b"abc")
    assert (tmp_path / "f").read_bytes() == b"abc"


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"before")
    with pytest.raises(FileExistsError), new_file(tmp_path / "f", 1 << 40):
        pass
    assert (tmp_path / "f").read_bytes() == b"before"


def test_failed_write_raises_os_error(tmp_path: Path) -> None:
    """The limit on the size of files stands for a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BUFFER_BYTES, hard))
    try:
        with pytest.raises(OSError, match="File too large"), new_file(tmp_path / "f", 1) as file:
            file.write(bytes(2 * BUFFER_BYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
