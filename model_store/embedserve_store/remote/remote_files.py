"""Lists, reads, downloads and uploads the files of a remote store through fsspec.

The only module that uses fsspec. It handles bytes and sizes, and knows nothing of models. Never
imports torch; imports fsspec when a store is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any

from embedserve_store.errors import MissingFileError, StoreError, UnreachableError
from embedserve_store.remote.retry_log import RetryLog
from embedserve_store.remote.store_errors import logged_waits, one_line, translated
from embedserve_store.remote.transfer_pool import TransferPool, run
from embedserve_store.writing.small_files import write_new

PART_BYTES = 16 << 20
PARTS_AT_ONCE = 8
"""Number of parts that are in transfer concurrently, and the most that are held in memory. A single
connection to an object store is slower than most networks."""

ANSWER_S_MAX = 60.0
"""Seconds until a listing or a small read times out. A slower store is considered hung."""
CONFIRM_BYTES_PER_S = 10_000_000
"""Minimum rate at which a store reads a new object before it confirms its arrival; 10 MB/s. Some S3
servers, such as rclone, hash the whole object for each response about it. A hard disk that does
several such reads at a time has this rate. The limit of the wait follows from it."""
PART_S_MAX = 600.0
"""Seconds until a part in transfer times out. The limit equals 28 kB/s; at a lower rate no large
version would ever arrive."""

_MODIFIED = ("LastModified", "mtime", "last_modified", "updated", "created")
"""Keys under which file systems of fsspec say when a file was written."""
_CHECKSUMS = ("ETag", "etag")
"""Keys under which file systems of fsspec give a checksum of a file."""
LOCAL = ("file://", "local://")
"""Beginnings of the URLs of folders on this host."""
EXTRA = "pip install 'embedserve[remote]'; gs:// needs gcsfs"


class RemoteFolder:
    """A folder on a file system that fsspec supports. It connects on first use.

    Args:
        url: URL of the folder, such as s3://bucket/folder.

    Raises:
        StoreError: this kind of URL is no store, it names no folder, or fsspec or a package that
            it needs for it is not installed.
    """

    def __init__(self, url: str) -> None:
        scheme, _, path = url.partition("://")
        if not path.strip("/"):
            raise StoreError(f"{url}: names no bucket or folder: is a variable unset?")
        if url.startswith(LOCAL) and not path.startswith("/"):
            raise StoreError(f"{url}: names a relative folder, expected {scheme}:///PATH")
        self.url = url.rstrip("/")
        self._files, self.root = _open(self.url)
        self._patient: dict[int, Any] = {}
        self._patient_lock = threading.Lock()

    def folders(self, path: str = "") -> list[str]:
        """Returns the names of the folders in this folder, or at ``path`` below it.

        Raises:
            StoreError: the folder does not exist.
            UnreachableError: the store cannot be reached. This applies to every method here.
        """
        entries = self._call("ls", path, detail=True)
        folders = (entry["name"] for entry in entries if entry["type"] == "directory")
        return [name.rstrip("/").rpartition("/")[2] for name in folders]

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the bytes of every file below ``folder``, by its relative path; empty if none."""
        found = self._call("find", folder, detail=True)
        prefix = len(f"{self.root}/{folder}/".lstrip("/"))
        return {name.lstrip("/")[prefix:]: entry["size"] for name, entry in found.items()}

    def listing_checksum(self, folder: str) -> str:
        """Returns a checksum of the listing of ``folder``, which changes if a file is replaced."""
        found = self._call("find", folder, detail=True)
        keys = ("size", *_MODIFIED, *_CHECKSUMS)
        listed = [(name, *(str(one.get(key)) for key in keys)) for name, one in found.items()]
        return hashlib.sha256(repr(sorted(listed)).encode()).hexdigest()

    def names(self, folder: str) -> Iterator[str]:
        """Yields the names of the files in ``folder``, in any order; none if there is no folder.

        An object store of S3 lists them in pages, and one page is in memory.
        """
        if not self.has_s3_calls:
            yield from (name for name in self.sizes(folder) if "/" not in name)
            return
        _, prefix = self.bucket_and_key(folder)
        prefix = f"{prefix.rstrip('/')}/"
        options: dict[str, Any] = {"Prefix": prefix, "Delimiter": "/"}
        while True:
            page = self.s3_call("list_objects_v2", folder, max_s=ANSWER_S_MAX, **options)
            for entry in page.get("Contents", ()):
                if name := entry["Key"].removeprefix(prefix):
                    yield name
            if not page.get("IsTruncated"):
                return
            options["ContinuationToken"] = page["NextContinuationToken"]

    def modified_s(self, name: str, read_bytes: int = 0) -> float | None:
        """Returns when a file was written, in seconds since the Unix epoch; None if unknown.

        Args:
            read_bytes: bytes that the store may read before it responds.

        Raises:
            MissingFileError: the file does not exist.
        """
        info = self._call("info", name, read_bytes=read_bytes)
        found = next((info[key] for key in _MODIFIED if info.get(key)), None)
        if isinstance(found, str):
            found = datetime.fromisoformat(found)
        return found.timestamp() if isinstance(found, datetime) else found

    def read(self, name: str, bytes_max: int) -> bytes:
        """Reads a small file; at most ``bytes_max`` and one byte more are requested.

        Raises:
            StoreError: the file has more than ``bytes_max`` bytes.
        """
        try:
            data = self._part(name, 0, bytes_max + 1, ANSWER_S_MAX)
        except UnreachableError as error:
            # An object store refuses any range of an empty file, as not satisfiable.
            if "range" not in str(error.__cause__).lower() or self.size(name):
                raise
            return b""
        if len(data) > bytes_max:
            raise StoreError(f"{self.url}/{name}: more than {bytes_max} bytes, which is the limit")
        return data

    def blocks(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yields bytes ``start`` to ``stop`` of ``name``, in order, in parts.

        Several parts are requested concurrently. If the file has become shorter, bytes are missing:
        the caller compares them with a checksum.
        """
        parts: deque[Future[bytes]] = deque()
        # If a part failed or the caller was interrupted, no further part is requested.
        with TransferPool(PARTS_AT_ONCE, "download") as pool:
            for at in range(start, stop, PART_BYTES):
                if len(parts) == PARTS_AT_ONCE:
                    yield parts.popleft().result()
                end = min(at + PART_BYTES, stop)
                with translated(f"{self.url}/{name}"):  # perhaps no thread can start
                    parts.append(pool.submit(self._part, name, at, end, PART_S_MAX))
            while parts:
                yield parts.popleft().result()

    def _part(self, name: str, start: int, stop: int, max_s: float) -> bytes:
        data: bytes = self._call("cat_file", name, max_s=max_s, start=start, end=stop)
        return data

    def upload(self, name: str, blocks: Iterator[bytes]) -> None:
        """Writes a file from ``blocks``, replacing an existing one."""
        where = f"{self.url}/{name}"
        with translated(where):
            file = self._files.open(f"{self.root}/{name}", "wb", block_size=PART_BYTES)
        try:
            for block in blocks:
                with translated(where):
                    file.write(block)
        finally:
            with translated(where):
                file.close()

    def size(self, name: str, read_bytes: int = 0) -> int:
        """Returns the bytes of a file.

        Args:
            read_bytes: bytes that the store may read before it responds.

        Raises:
            MissingFileError: the file does not exist.
        """
        return int(self._call("info", name, read_bytes=read_bytes)["size"])

    def has(self, name: str) -> bool:
        """Returns whether a file exists, without listing others."""
        try:
            self.size(name)
        except MissingFileError:
            return False
        return True

    @property
    def has_s3_calls(self) -> bool:
        """Returns whether the store is reached by s3fs, so that ``s3_call`` works."""
        return hasattr(self._files, "_call_s3")

    def s3_call(
        self,
        operation: str,
        name: str,
        *,
        max_s: float | None = None,
        read_bytes: int = 0,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Calls an operation of S3, such as upload_part, on the object ``name``.

        Args:
            max_s: timeout. Default: PART_S_MAX.
            read_bytes: bytes that the store may read before it responds.
            arguments: as botocore takes them. With a Prefix, the operation takes no key.
        """
        bucket, key = self.bucket_and_key(name)
        arguments |= {"Bucket": bucket} | ({} if "Prefix" in arguments else {"Key": key})
        arguments |= {"max_s": max_s or PART_S_MAX, "read_bytes": read_bytes}
        found: dict[str, Any] = self._call_at(
            f"{self.url}/{name}", "call_s3", operation, **arguments
        )
        return found

    def bucket_and_key(self, name: str) -> tuple[str, str]:
        bucket, key, _ = self._files.split_path(f"{self.root}/{name}")
        return bucket, key

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file, replacing an existing one."""
        self._call("pipe_file", name, data)

    def write_new(self, name: str, data: bytes) -> bool:
        """Writes a small file, which appears whole. Returns False if the file already exists.

        If the store has no conditional writes, the later of two concurrent writers wins.
        """
        # A file that fsspec writes on this host can be seen half-written.
        if self.url.startswith(LOCAL):
            with translated(f"{self.url}/{name}"):
                return write_new(Path(self.root) / name, data)
        if self.has(name):
            return False
        try:
            self._call("pipe_file", name, data, max_s=PART_S_MAX, mode="create")
        except UnreachableError:  # s3fs raises no specific error for a condition that was not met
            if self.has(name):
                return False
            raise
        return True

    def refuses_second(self, name: str) -> bool:
        """Returns whether the store refuses to create a file that exists.

        Creates the file ``name`` twice, and removes it.
        """
        self._call("pipe_file", name, b"1", mode="create")
        try:
            self._call("pipe_file", name, b"2", mode="create")
        except UnreachableError:
            return self.read(name, 1) == b"1"
        finally:
            self.remove(name)
        return False

    def remove(self, name: str) -> None:
        """Removes a file."""
        self._call("rm_file", name)

    def remove_folder(self, name: str) -> None:
        """Removes an empty folder, if the file system has folders."""
        with contextlib.suppress(NotImplementedError, OSError):
            self._files.rmdir(f"{self.root}/{name}")

    def _call(self, method: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls ``method`` of the file system with the path of ``name``, as ``_call_at`` does."""
        where, path = (f"{one}/{name}".rstrip("/") for one in (self.url, self.root))
        return self._call_at(where, method, path, *args, **kwargs)

    def _call_at(
        self,
        where: str,
        method: str,
        *args: Any,
        max_s: float | None = None,
        read_bytes: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Calls ``method`` of the file system.

        Args:
            max_s: timeout of a network file system. Default: ANSWER_S_MAX.
            read_bytes: bytes that the store may read before it responds. The timeout is then at
                least the time for that at CONFIRM_BYTES_PER_S, and ANSWER_S_MAX more.

        Raises:
            StoreError: ``where`` does not exist.
            UnreachableError: the store does not respond in time.
        """
        files, limit_s, reason = self._files, ANSWER_S_MAX if max_s is None else max_s, ""
        if read_bytes >= PART_BYTES:
            read_s = ANSWER_S_MAX + read_bytes / CONFIRM_BYTES_PER_S
            if read_s > limit_s:
                limit_s = read_s
                reason = f", for {read_bytes:,} bytes at {CONFIRM_BYTES_PER_S:,} bytes/s"
            if self.has_s3_calls:
                files = self._patient_files(read_s)
        with translated(where), logged_waits(where):
            if not getattr(files, "async_impl", False):
                return getattr(files, method)(*args, **kwargs)
            try:
                return run(files.loop, _call_async(files, method, *args, **kwargs), limit_s)
            except TimeoutError as error:
                raise TimeoutError(f"no answer within {limit_s:g} s{reason}") from error

    def _patient_files(self, response_s: float) -> Any:
        """Returns the file system with a client that waits ``response_s`` or longer.

        The value is rounded up to a power of two, because each value has a client of its own. All
        threads share it; older releases of fsspec make one for each thread.
        """
        rounded_s = 2 ** math.ceil(math.log2(response_s))
        with self._patient_lock:
            if rounded_s not in self._patient:
                self._patient[rounded_s], _ = _open(self.url, rounded_s)
            return self._patient[rounded_s]


async def _call_async(files: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    # s3fs has this method. Other file systems do not report their retries.
    if hasattr(files, "set_session"):
        client = await files.set_session()
        RetryLog().listen(client.meta.events)
    return await getattr(files, f"_{method}")(*args, **kwargs)


def _open(url: str, response_s: float | None = None) -> tuple[Any, str]:
    """Returns the file system of ``url`` and the folder's path on it.

    Args:
        response_s: seconds that an S3 server may take to respond. Default: that of s3fs, 15 s,
            after which the request is sent again.
    """
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise StoreError(f"{url}: a remote store needs fsspec: {EXTRA}") from error
    if url.startswith(("http://", "https://")):
        raise StoreError(
            f"{url}: HTTP cannot list or write files: use s3://, gs:// or file://; an S3 server's "
            "own address is set as AWS_ENDPOINT_URL"
        )
    options = _options(url)
    if response_s is not None:
        configured = options.get("config_kwargs", {})
        longer = {"read_timeout": max(response_s, configured.get("read_timeout", 0))}
        options["config_kwargs"] = configured | longer
    try:
        files, root = url_to_fs(url, **options)
    except ImportError as error:
        raise StoreError(f"{url}: this kind of store is not installed: {EXTRA}") from error
    except ValueError as error:
        raise StoreError(f"{url}: not a store: {one_line(error)}") from error
    return files, root.rstrip("/")


def _options(url: str) -> dict[str, Any]:
    from fsspec.config import conf

    # The listings cache is off, because a cached listing is outdated when another process
    # publishes.
    options: dict[str, Any] = {"use_listings_cache": False}
    if url.startswith(LOCAL):
        options["auto_mkdir"] = True
    if url.startswith(("s3://", "s3a://")):
        # Some servers return the checksum of the whole object with a part of it, and botocore then
        # rejects the response. Every byte is checked against the manifest anyway.
        configured = conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {"response_checksum_validation": "when_required"} | configured
    return options
