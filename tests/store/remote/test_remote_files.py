"""Tests of a store that hangs or fails for a while: the client retries for a limited time, and logs
that."""

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from code_forker import CodeForker
from server.thread_limit import make_thread_start_fail
from store.remote.conftest import use_endpoint
from store.remote.s3_proxy import Response, S3Proxy, serve_proxy

from embedserve_store.errors import MissingFileError, StoreError, UnreachableError
from embedserve_store.remote import remote_files, store_errors
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.transfer_pool import TransferPool

WAIT_S_MAX = 60.0
EMPTY = (
    b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
)


def serve_statuses(next_status: Callable[[], int]) -> AbstractContextManager[str]:
    """Serves an empty S3 bucket whose HTTP statuses ``next_status`` returns; yields its URL."""

    class Statuses(S3Proxy):
        def respond(self, body: bytes) -> Response:
            return (404, {}, b"") if self.command == "HEAD" else (next_status(), {}, EMPTY)

    return serve_proxy(Statuses, "")


def test_unresponsive_store_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_endpoint(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        folder = RemoteFolder("s3://bucket/store")
        with pytest.raises(UnreachableError, match=r"store/m: .*: no answer within 2 s$"):
            folder._call("find", "m", detail=True, max_s=2)


def test_interrupt_cancels_the_transfer_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_endpoint(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        folder = RemoteFolder("s3://bucket/store")
        with suppress(KeyboardInterrupt), TransferPool(1, "upload") as pool:
            part = pool.submit(folder.s3_call, "put_object", "rows", Body=b"1")
            connection, _ = silent.accept()
            raise KeyboardInterrupt
        connection.close()
        with pytest.raises(UnreachableError, match=r"store/rows: .*: CancelledError"):
            part.result(0)


def test_file_is_unreachable_while_no_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows").write_bytes(b"1234")
    folder = RemoteFolder(f"file://{tmp_path}")
    make_thread_start_fail(monkeypatch, "download")
    with pytest.raises(UnreachableError, match=r"rows: .*: can't start new thread"):
        list(folder.blocks("rows", 0, 4))
    assert list(folder.blocks("rows", 0, 4)) == [b"1234"]


def test_wait_is_logged_at_doubling_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_errors, "WAIT_LOG_S", 0.2)

    def status_after_three_lines() -> int:
        ends_s = time.monotonic() + WAIT_S_MAX
        while len(waits()) < 3 and time.monotonic() < ends_s:
            time.sleep(0.01)
        return 200

    def waits() -> list[str]:
        return [line for line in caplog.messages if "has not answered for" in line]

    with serve_statuses(status_after_three_lines) as url:
        use_endpoint(monkeypatch, url)
        with caplog.at_level(logging.WARNING, "embedserve_store"):
            assert RemoteFolder("s3://bucket/store").sizes("m") == {}
    assert waits()[:3] == [
        f"s3://bucket/store/m: the remote store has not answered for {waited} s"
        for waited in ("0.2", "0.4", "0.8")
    ]


def test_small_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    folder = RemoteFolder(f"file://{tmp_path}")
    assert folder.read("file", 5) == b"12345"
    with pytest.raises(StoreError, match="file: more than 4 bytes, which is the limit"):
        folder.read("file", 4)


CUT_SHORT = """
import resource, signal, sys
from embedserve_store.remote.remote_files import RemoteFolder

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))
RemoteFolder(sys.argv[1]).write_new("m/1/file", b"12345")
"""
"""Is killed once it has written 3 bytes."""


def test_new_file_of_a_killed_writer_does_not_appear(tmp_path: Path, forking: CodeForker) -> None:
    url = f"file://{tmp_path}"
    assert forking.run(CUT_SHORT, url) == -signal.SIGXFSZ
    folder = RemoteFolder(url)
    assert not folder.has("m/1/file")
    assert folder.write_new("m/1/file", b"12345")
    assert not folder.write_new("m/1/file", b"67890")
    assert folder.read("m/1/file", 5) == b"12345"


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_file_modification_times_are_returned(tmp_path: Path, scheme: str) -> None:
    folder = RemoteFolder(f"{scheme}://{tmp_path}")
    before_s = time.time()
    folder.write("a/file", b"12345")
    assert list(folder.names("a")) == ["file"]
    modified_s = folder.modified_s("a/file")
    assert modified_s is not None
    assert abs(modified_s - before_s) < 60
    with pytest.raises(MissingFileError):
        folder.modified_s("other")


def test_retried_failure_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_errors, "WAIT_LOG_S", WAIT_S_MAX)
    statuses = iter([503])
    with serve_statuses(lambda: next(statuses, 200)) as url:
        use_endpoint(monkeypatch, url)
        folder = RemoteFolder("s3://bucket/store")
        with caplog.at_level(logging.WARNING, "embedserve_store"):
            assert folder.sizes("m") == {}
            assert folder.sizes("m") == {}
    assert caplog.messages == [f"{url}/bucket: attempt 1 failed: HTTP status 503"]


def test_responsive_store_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_errors, "WAIT_LOG_S", WAIT_S_MAX)
    with serve_statuses(lambda: 200) as url:
        use_endpoint(monkeypatch, url)
        with caplog.at_level(logging.DEBUG, "embedserve_store"):
            assert RemoteFolder("s3://bucket/store").sizes("m") == {}
    assert caplog.messages == []
    waiting = [thread for thread in threading.enumerate() if thread.name == "store-wait"]
    for thread in waiting:
        thread.join(WAIT_S_MAX)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: list(folder.names("m")),
        lambda folder: folder.write_new("m/alias", b"1"),
        lambda folder: folder.refuses_second("m/probe"),
    ],
    ids=["names", "write_new", "refuses_second"],
)
def test_small_calls_of_an_unresponsive_store_end(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[RemoteFolder], object]
) -> None:
    monkeypatch.setattr(remote_files, "ANSWER_S_MAX", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_endpoint(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UnreachableError, match=r"no answer within 0\.1 s$"):
            call(RemoteFolder("s3://bucket/store"))


def test_unresponsive_store_is_not_asked_for_a_size_because_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_files, "ANSWER_S_MAX", 0.1)
    monkeypatch.setattr(RemoteFolder, "size", Mock(side_effect=AssertionError("a second call")))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_endpoint(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UnreachableError, match=r"no answer within 0\.1 s$"):
            RemoteFolder("s3://orange/store").read("manifest.json", 1)
