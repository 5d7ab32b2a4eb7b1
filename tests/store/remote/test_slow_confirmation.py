"""Tests of the timeout of uploads: as long as a store may need to read the uploaded bytes, and no
longer."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from store.remote.conftest import Publish, use_endpoint
from store.remote.s3_proxy import Response, S3Proxy, serve_proxy

from embedserve_store import ModelStore, copy_versions
from embedserve_store.errors import UnreachableError
from embedserve_store.remote import remote_files, store_errors
from embedserve_store.remote.remote_files import RemoteFolder

ROWS = 250_000
"""Rows of a table of 16 MB, which is sent in parts."""
HELD_S_MAX = 60.0
READ_S = 1
"""Seconds after which the client retries other requests."""
WAITED = "has not answered for 2 s"
"""End of the log line at which the held response is released."""


class SlowStore(logging.Handler):
    """A store that holds its responses about tables.safetensors until the client logs the wait.

    Attributes:
        url: endpoint of the store.
        held_methods: methods of the requests whose responses it held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.url = ""
        self.held_methods: list[str] = []
        self.has_waited = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().endswith(WAITED):
            self.has_waited.release()

    def handler(self) -> type[S3Proxy]:
        store = self

        class Slow(S3Proxy):
            def respond(self, body: bytes) -> Response:
                is_part = self.command == "PUT" and "partNumber=1&" in f"{self.path}&"
                is_completed = self.command == "POST" and "uploadId=" in self.path
                is_size = self.command == "HEAD" and "tables.safetensors" in self.path
                if is_part or is_completed or is_size:
                    store.held_methods.append(self.command)
                    store.has_waited.acquire(timeout=HELD_S_MAX)
                return self.forward(body)

        return Slow


@pytest.fixture
def slow(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStore]:
    """Yields the store behind AWS_ENDPOINT_URL; the client's usual timeout is one second."""
    monkeypatch.setattr(store_errors, "WAIT_LOG_S", 0.5)
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", READ_S)
    store = SlowStore()
    logger = logging.getLogger("embedserve_store")
    with serve_proxy(store.handler(), endpoint) as store.url:
        use_endpoint(monkeypatch, store.url)
        logger.addHandler(store)
        yield store
        logger.removeHandler(store)
        store.has_waited.release(100)


def test_slow_confirmation_of_an_upload_is_awaited(
    new_version: Publish, url: str, monkeypatch: pytest.MonkeyPatch, slow: SlowStore, tmp_path: Path
) -> None:
    """The store reads a part, an object that may be there, the new one when the upload completes,
    and the new one for its size.

    The client retries no request meanwhile.
    """
    local = new_version(1.0, ROWS).parent.parent
    monkeypatch.setattr(remote_files, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(remote_files, "PARTS_AT_ONCE", 1)
    assert copy_versions(local, url, "m").copied == [1]
    assert slow.held_methods == ["PUT", "HEAD", "POST", "HEAD"]


def test_existing_versions_are_not_listed_for_the_next_number(
    new_version: Publish, url: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some stores read all objects that they list."""
    listed: list[str] = []

    class Listing(S3Proxy):
        def respond(self, body: bytes) -> Response:
            if self.command == "GET" and "list-type=2" in self.path:
                listed.append(self.path)
            return self.forward(body)

    local = new_version().parent.parent
    copy_versions(local, url, "m")
    new_version(2.0)
    with serve_proxy(Listing, endpoint) as proxy:
        use_endpoint(monkeypatch, proxy)
        assert copy_versions(local, url, "m").copied == [2]
    assert not [path for path in listed if "prefix=stores%2Fa%2Fm%2F&" in path], listed
    assert not [path for path in listed if "prefix=stores%2Fa%2Fm%2F2%2F&" in path], listed


@pytest.mark.parametrize("seconds", [30, 0.5])
def test_confirmation_timeout_depends_on_the_size(
    uploaded: Path, url: str, monkeypatch: pytest.MonkeyPatch, slow: SlowStore, seconds: float
) -> None:
    nbytes = 10**9
    monkeypatch.setattr(remote_files, "ANSWER_S_MAX", 1.0)
    monkeypatch.setattr(remote_files, "CONFIRM_BYTES_PER_S", int(nbytes / seconds))
    folder, name = RemoteFolder(url), "m/1/tables.safetensors"
    if seconds > 1:
        assert folder.size(name, nbytes) == (uploaded / "tables.safetensors").stat().st_size
        assert slow.held_methods == ["HEAD"]
    else:
        monkeypatch.setattr(store_errors, "WAIT_LOG_S", HELD_S_MAX)  # or the store responds at 2 s
        message = (
            f"{url}/{name}: the remote store says: no answer within 1.5 s, for 1,000,000,000 "
            "bytes at 2,000,000,000 bytes/s"
        )
        with pytest.raises(UnreachableError) as raised:
            folder.size(name, nbytes)
        assert str(raised.value) == message


def test_missing_file_is_detected(uploaded: Path, url: str) -> None:
    folder = RemoteFolder(url)
    assert folder.has("m/1/manifest.json")
    assert not folder.has("m/2/manifest.json")
    assert ModelStore(url).versions("m") == [1]
