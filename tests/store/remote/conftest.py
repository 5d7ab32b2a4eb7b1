"""Fixtures: a bucket on a real S3 server, a cache, and a published version to upload."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from botocore_models import cache_models
from code_forker import CodeForker, start_code_forker
from store.remote.s3_server import environment, serve_s3
from writable import writable

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.publishing.publish import publish
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.remote_store import RemoteStore

Publish = Callable[..., Path]
Place = Callable[[str, str], str]
KINDS = ("folder", "s3", "file")


cache_models()

IMPORT_REMOTE = """
import botocore.session
import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from botocore_models import cache_models

import embedserve_store.copying.copy_versions
import embedserve_store.model_store
import embedserve_store.remote.remote_store

cache_models()
AIOHTTPSession()._build_verify_context()
keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
botocore.session.get_session().create_client("s3", region_name="us-east-1", **keys)
"""
"""Imports that take longer than the code that is killed."""


@pytest.fixture(scope="session")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that the S3 server serves: a folder for each bucket."""
    return tmp_path_factory.mktemp("s3")


@pytest.fixture(scope="session")
def endpoint(buckets: Path) -> Iterator[str]:
    with serve_s3(buckets) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def forking() -> Iterator[CodeForker]:
    """Yields a process whose forks run code that is killed while it copies or pulls."""
    with start_code_forker(IMPORT_REMOTE) as one:
        yield one


@pytest.fixture(scope="module", autouse=True)
def connections() -> Iterator[None]:
    """Clears s3fs's cached connections, once per module. s3fs caches them by URL options whatever
    the environment is, so it would reuse those of other modules. Recreating them for each test
    would take longer than most of the tests."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Sends the requests of this test to another S3 server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    s3fs.S3FileSystem.clear_instance_cache()


def aws_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> Iterator[None]:
    for name in aws_environment():
        monkeypatch.delenv(name)
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)
    before = aws_environment()
    yield
    if aws_environment() != before:
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def objects(aws: None) -> s3fs.S3FileSystem:
    """Returns another client of the server's buckets."""
    return s3fs.S3FileSystem(use_listings_cache=False)


@pytest.fixture
def root(objects: s3fs.S3FileSystem) -> str:
    """Returns BUCKET/FOLDER of a store in a new bucket."""
    bucket = f"bucket-{secrets.token_hex(4)}"
    objects.call_s3("create_bucket", Bucket=bucket)
    return f"{bucket}/stores/a"


@pytest.fixture
def url(root: str) -> str:
    return f"s3://{root}"


@pytest.fixture
def place(tmp_path: Path, url: str) -> Place:
    """Returns a function from a kind of store and a name to its location."""

    def of(kind: str, name: str) -> str:
        folder = str(tmp_path / name)
        return {"folder": folder, "file": f"file://{folder}", "s3": f"{url}/{name}"}[kind]

    return of


@pytest.fixture
def store(url: str, tmp_path: Path) -> RemoteStore:
    return RemoteStore(url, tmp_path / "cache")


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the bytes that were read from the remote store, by name of the file."""
    read: dict[str, int] = {}
    call = RemoteFolder._part

    def part(self: RemoteFolder, name: str, start: int, stop: int, max_s: float) -> bytes:
        data = call(self, name, start, stop, max_s)
        file = name.rpartition("/")[2]
        read[file] = read.get(file, 0) + len(data)
        return data

    monkeypatch.setattr(RemoteFolder, "_part", part)
    return read


def publish_rows(store: Path, value: float, rows: int, **options: Any) -> Path:
    """Publishes "m" with row i equal to i * ``value``; returns the version's folder."""
    state = {"embedding_bags.t.weight": torch.arange(rows)[:, None].expand(-1, 16).float() * value}
    tables = [TableSpec("t", rows, 16, ("t",), "sum", "float32")]
    return publish(state, store, model="m", tables=tables, **options).path


@pytest.fixture(scope="session")
def first_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the version that most tests begin with; not to be changed."""
    return publish_rows(tmp_path_factory.mktemp("first"), 1.0, 2000)


@pytest.fixture(scope="session")
def five_versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns the folders of versions 1 to 5 of "m", with small tables; not to be changed."""
    store = tmp_path_factory.mktemp("five")
    return [publish_rows(store, float(number), 20) for number in range(1, 6)]


@pytest.fixture
def new_version(tmp_path: Path, first_version: Path) -> Publish:
    """Returns a function that publishes a version of "m" in a local store and returns its
    folder."""

    def run(value: float = 1.0, rows: int = 2000, **options: Any) -> Path:
        folder = tmp_path / "local" / "m" / "1"
        if (value, rows, options) == (1.0, 2000, {}) and not folder.exists():
            shutil.copytree(first_version, folder)
            return folder
        return publish_rows(tmp_path / "local", value, rows, **options)

    return run


@pytest.fixture
def put(buckets: Path, root: str) -> Callable[[Path], None]:
    """Returns a function that puts a version into the store, without requests to the S3 server.

    The server lists a folder of a new bucket when it is first requested.
    """

    def put(folder: Path) -> None:
        writable(shutil.copytree(folder, buckets / root / folder.parent.name / folder.name))

    return put


def pulled_files(cache: Path) -> list[str]:
    """Returns the names of all files in the cache except locks and records of damage."""
    beside = (".lock", ".damaged")
    return sorted(p.name for p in cache.rglob("*") if p.is_file() and p.suffix not in beside)


@pytest.fixture
def uploaded(new_version: Publish, put: Callable[[Path], None]) -> Path:
    """Puts version 1 of "m" into the store; returns its local folder."""
    folder = new_version()
    put(folder)
    return folder
