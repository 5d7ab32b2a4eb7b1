"""Tests of a region of shared memory: the files that it accepts, and changes of its file
meanwhile."""

import contextlib
import fcntl
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from open_files import open_below

from embedserve.errors import InvalidRequestError
from embedserve.shared_memory import region as region_module
from embedserve.shared_memory.region import FOLDER, MemorySlice, Region, open_region

BYTES = bytes(range(100))
OpenRegion = Callable[..., Region]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ids"
    path.write_bytes(BYTES)
    return path


@pytest.fixture
def open_test_region(tmp_path: Path) -> Iterator[OpenRegion]:
    regions: list[Region] = []

    def open_with_defaults(key: str = "/ids", offset: int = 10, byte_size: int = 50) -> Region:
        regions.append(open_region("mine", key, offset, byte_size, "/", str(tmp_path)))
        return regions[-1]

    yield open_with_defaults
    for one in regions:
        one.close()


def test_region_bytes_are_read_and_written(file: Path, open_test_region: OpenRegion) -> None:
    region = open_test_region()
    assert (region.name, region.key, region.offset, region.byte_size) == ("mine", "/ids", 10, 50)
    assert region.read(5, 20) == BYTES[15:35]
    first, second = bytearray(3), bytearray(7)
    region.read_into(40, [memoryview(first), memoryview(second)])
    assert bytes(first + second) == BYTES[50:60]
    region.write(48, memoryview(b"ab"))
    assert file.read_bytes() == BYTES[:58] + b"ab" + BYTES[60:]
    assert open_test_region("ids", 0, 100).read(0, 100) == file.read_bytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_chunks_are_written_consecutively(
    file: Path, open_test_region: OpenRegion, dtype: type[np.floating]
) -> None:
    place = MemorySlice(open_test_region(), 4, 46)
    chunks = [np.full((2, 3), 1.5, dtype), np.zeros((0, 3), dtype), np.full((1, 3), -2, dtype)]
    place.write(one.data for one in chunks)
    values = b"".join(one.tobytes() for one in chunks)
    assert file.read_bytes() == BYTES[:14] + values + BYTES[14 + len(values) :]


def test_read_bytes_are_a_copy(file: Path, open_test_region: OpenRegion) -> None:
    read = open_test_region().read(0, 50)
    file.write_bytes(bytes(100))
    assert read == BYTES[10:60]


@pytest.mark.parametrize(
    "key",
    ["", "/", ".", "/.", "..", "/..", "../ids", "a/b", "/a/b", "//ids", "ids/", "i\0ds", "i\nds"],
)
def test_key_must_be_a_file_name(open_test_region: OpenRegion, file: Path, key: str) -> None:
    with pytest.raises(InvalidRequestError, match="it is no name of a file in /dev/shm") as caught:
        open_test_region(key)
    assert caught.value.field == "key"


@pytest.mark.parametrize("key", ["k" * 256, "/" + "ä" * 128])
def test_key_length_is_limited(open_test_region: OpenRegion, key: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^key is '.{64}…': it has over 255 bytes$"):
        open_test_region(key)


def test_key_must_begin_with_the_prefix(file: Path) -> None:
    folder = str(file.parent)
    for key in ("ids", "/ids"):
        open_region("mine", key, 0, 1, "/id", folder).close()
        with pytest.raises(InvalidRequestError, match="does not begin with '/ranker-'"):
            open_region("mine", key, 0, 1, "/ranker-", folder)


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.symlink_to("ids"), "it is a link"),
        (lambda path: path.symlink_to("/dev/null"), "it is a link"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: os.mkfifo(path), "it is no regular file"),
        (socket_at, "No such device or address"),
        (lambda path: path.hardlink_to(path.with_name("ids")), "its file has 2 names, not 1"),
    ],
)
def test_only_regular_files_with_one_link_are_opened(
    open_test_region: OpenRegion, file: Path, make: Callable[[Path], None], message: str
) -> None:
    make(file.with_name("other"))
    with pytest.raises(InvalidRequestError, match=f"^key is 'other': {message}"):
        open_test_region("other", 0, 1)
    assert not open_below(file.parent)


def test_open_does_not_wait_for_a_file_lease() -> None:
    """Guards against the kernel's wait for a lease, which takes 45 s."""
    path = Path(FOLDER) / f"embedserve-test-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        os.ftruncate(descriptor, 100)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(InvalidRequestError, match="Resource temporarily unavailable"):
            open_region("mine", path.name, 0, 100)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        open_region("mine", path.name, 0, 100).close()
    finally:
        os.close(descriptor)
        path.unlink()
        signal.signal(signal.SIGIO, before)


def test_range_must_end_within_the_file(open_test_region: OpenRegion, file: Path) -> None:
    assert open_test_region("ids", 99, 1).read(0, 1) == BYTES[99:]
    for offset, byte_size in ((0, 101), (100, 1), (2**64, 1)):
        message = f"^offset and byte_size end at {offset + byte_size}, but 'ids' has 100 bytes$"
        with pytest.raises(InvalidRequestError, match=message):
            open_test_region("ids", offset, byte_size)


def test_truncated_file_is_an_error_not_a_signal(open_test_region: OpenRegion, file: Path) -> None:
    region = open_test_region()
    os.truncate(file, 30)
    assert region.read(0, 20) == BYTES[10:30]
    message = "region 'mine': its file was cut to 30 bytes, and is asked for up to 31$"
    with pytest.raises(InvalidRequestError, match=message):
        region.read(0, 21)
    with pytest.raises(InvalidRequestError, match=message):
        region.write(0, memoryview(bytes(21)))
    assert file.read_bytes() == BYTES[:30]


def test_file_truncated_repeatedly_during_use_is_an_error(
    open_test_region: OpenRegion, file: Path
) -> None:
    """Guards against a mapping, whose access to a truncated file would end the process."""
    nbytes = 1 << 20
    file.write_bytes(bytes(nbytes))
    region, values = open_test_region("ids", 0, nbytes), memoryview(b"a" * nbytes)
    is_over = threading.Event()

    def truncate_repeatedly() -> None:
        while not is_over.is_set():
            os.truncate(file, 0)
            os.truncate(file, nbytes)

    with ThreadPoolExecutor(1) as executor:
        cutting = executor.submit(truncate_repeatedly)
        for _ in range(300):
            with contextlib.suppress(InvalidRequestError):
                region.write(0, values)
            with contextlib.suppress(InvalidRequestError):
                assert len(region.read(0, nbytes)) == nbytes
        is_over.set()
        cutting.result()
    region.write(0, values)
    assert region.read(0, nbytes) == values


def test_removed_file_is_an_error(open_test_region: OpenRegion, file: Path) -> None:
    region = open_test_region()
    before = region.is_unlinked
    file.unlink()
    assert (before, region.is_unlinked) == (False, True)
    with pytest.raises(InvalidRequestError, match=r"region 'mine': its file was removed$"):
        region.read(0, 1)
    with pytest.raises(InvalidRequestError, match=r"region 'mine': its file was removed$"):
        region.write(0, memoryview(b"a"))


def test_write_error_names_its_reason(open_test_region: OpenRegion, file: Path) -> None:
    region = open_test_region()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (15, limits[1]))
        with pytest.raises(InvalidRequestError, match=r"region 'mine': File too large$"):
            region.write(10, memoryview(b"a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_region_is_closed_after_its_last_use(open_test_region: OpenRegion, file: Path) -> None:
    region = open_test_region()
    with region.opened(50) as descriptor:
        region.close()
        assert os.fstat(descriptor).st_size == 100
        with pytest.raises(InvalidRequestError, match=r"it is not registered any more$"):
            region.read(0, 1)
    wait_until_closed()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    other = os.open(file, os.O_RDONLY)  # takes its number
    region.close()
    wait_until_closed()
    os.close(other)


def wait_until_closed() -> None:
    """Waits until the descriptors of all regions closed before are closed."""
    region_module.closer.submit(int).result()


def test_files_are_closed_in_a_thread(
    open_test_region: OpenRegion, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the kernel's work: the last descriptor of a removed file frees its memory."""
    close, threads = os.close, []

    def close_and_record(descriptor: int) -> None:
        threads.append(threading.current_thread())
        close(descriptor)

    region = open_test_region()
    monkeypatch.setattr(os, "close", close_and_record)
    region.close()
    wait_until_closed()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_file_is_closed_later_if_no_thread_can_be_started(
    open_test_region: OpenRegion, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "closer", ThreadPoolExecutor(1))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
        open_test_region().close()
    assert len(open_below(file.parent)) == 1
    open_test_region().close()
    wait_until_closed()
    assert not open_below(file.parent)
