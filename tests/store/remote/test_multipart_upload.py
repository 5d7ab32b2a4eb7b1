"""Tests of the completion of an upload in parts, also of one that was lost or aborted."""

from collections.abc import Iterator

import pytest
from store.remote.conftest import use_endpoint
from store.remote.s3_proxy import Response, S3Proxy, serve_proxy

from embedserve_store.errors import MissingFileError
from embedserve_store.remote import remote_files
from embedserve_store.remote.multipart_upload import MultipartUpload
from embedserve_store.remote.remote_files import RemoteFolder

PART_BYTES = 5 << 20
DATA = b"a" * PART_BYTES + b"b"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PART_BYTES", PART_BYTES)


def send(remote: RemoteFolder) -> MultipartUpload:
    upload = MultipartUpload(remote, "object", len(DATA), is_resumed=True)
    upload.send(iter([DATA]))
    return upload


@pytest.fixture
def completions(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> Iterator[list[int]]:
    """Yields the statuses of a store that completes an upload, but loses its first response."""
    statuses: list[int] = []

    class LosesResponse(S3Proxy):
        def respond(self, body: bytes) -> Response:
            answer = self.forward(body)
            if self.command != "POST" or "uploadId=" not in self.path:
                return answer
            statuses.append(answer[0])
            return answer if len(statuses) > 1 else (500, {}, b"")

    with serve_proxy(LosesResponse, endpoint) as proxy:
        use_endpoint(monkeypatch, proxy)
        yield statuses


def test_lost_response_to_the_completion_is_no_failure(url: str, completions: list[int]) -> None:
    remote = RemoteFolder(url)
    send(remote).complete()
    assert completions == [200, 404]
    assert remote.read("object", len(DATA)) == DATA


def test_completion_of_an_aborted_upload_fails_although_an_older_object_is_there(url: str) -> None:
    remote = RemoteFolder(url)
    remote.write("object", DATA)
    upload = send(remote)
    upload.abort()
    with pytest.raises(MissingFileError, match="object: does not exist"):
        upload.complete()
