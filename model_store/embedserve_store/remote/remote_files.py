"""Files of a remote store: listed, read, downloaded and uploaded through fsspec.

The only place that knows fsspec, and where what its many file systems raise becomes StoreError.
It gives bytes and sizes and knows nothing of models. Never imports torch; fsspec when opened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from embedserve_store.errors import StoreError
from embedserve_store.writing.staging import sync

PART_BYTES = 16 << 20
PARTS_AT_ONCE = 8
"""A download asks for this many parts at a time and holds as many in memory: one connection to an
object store is slower than most networks."""

EXTRA = "pip install 'embedserve[remote]'; gs:// needs gcsfs"


class UnreachableError(StoreError):
    """The remote store does not answer, or not to us; what is in it cannot be said."""


class TransferProgress(Protocol):
    """Called as the bytes of a version travel, file by file."""

    def __call__(self, file: str, bytes_done: int, bytes_total: int) -> None: ...


class RemoteFolder:
    """A folder on a file system that fsspec knows; connects when it is first asked something.

    Args:
        url: such as s3://bucket/folder.

    Raises:
        StoreError: fsspec, or what it needs for this kind of URL, is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, self.root = _open(self.url)

    def folders(self) -> list[str]:
        """Names of the folders in this one.

        Raises:
            StoreError: it does not exist.
            UnreachableError: it cannot be asked; so for every method here.
        """
        with _translated(self.url):
            entries = self._files.ls(self.root, detail=True)
        folders = (entry["name"] for entry in entries if entry["type"] == "directory")
        return [name.rstrip("/").rpartition("/")[2] for name in folders]

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file below ``folder``, by its path there; empty if there is none."""
        path = f"{self.root}/{folder}"
        with _translated(f"{self.url}/{folder}"):
            found = self._files.find(path, detail=True)
        prefix = len(path.lstrip("/")) + 1
        return {name.lstrip("/")[prefix:]: entry["size"] for name, entry in found.items()}

    def read(self, name: str) -> bytes:
        return self._part(name, None, None)

    def download(self, name: str, path: Path, size: int, progress: Callable[[int], None]) -> None:
        """Copies the file ``name`` of ``size`` bytes to the new file ``path``, synced to disk.

        Raises:
            StoreError: it is no longer of that size.
            OSError: ``path`` cannot be written.
        """
        pool = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="download")
        try:
            with open(path, "xb") as file:
                starts = range(0, size, PART_BYTES)
                parts = [pool.submit(self._copy_part, name, file, at, size) for at in starts]
                bytes_done = 0
                for part in as_completed(parts):
                    bytes_done += part.result()
                    progress(bytes_done)
        finally:
            # Where one part failed, or the caller was interrupted, no further one begins.
            pool.shutdown(cancel_futures=True)
        sync(path)

    def _copy_part(self, name: str, file: IO[bytes], start: int, size: int) -> int:
        stop = min(start + PART_BYTES, size)
        data = self._part(name, start, stop)
        if len(data) != stop - start:
            raise StoreError(f"{self.url}/{name}: ends before byte {stop}: changed while it came")
        return os.pwrite(file.fileno(), data, start)

    def _part(self, name: str, start: int | None, stop: int | None) -> bytes:
        with _translated(f"{self.url}/{name}"):
            data: bytes = self._files.cat_file(f"{self.root}/{name}", start=start, end=stop)
            return data

    def upload(self, path: Path, name: str, progress: Callable[[int], None]) -> None:
        """Copies the local file ``path`` to ``name``, over what is there.

        ``progress`` is called in a thread of fsspec and must not raise.

        Raises:
            StoreError: another size arrived than was sent.
        """
        from fsspec.callbacks import Callback

        size = path.stat().st_size
        callback = Callback(hooks={"progress": lambda _, sent, **__: progress(min(sent, size))})
        where = f"{self.url}/{name}"
        with _translated(where):
            self._files.put_file(str(path), f"{self.root}/{name}", callback=callback)
            arrived = self._files.info(f"{self.root}/{name}")["size"]
        if arrived != size:
            raise StoreError(f"{where}: {arrived} bytes arrived of {size}")

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file, over what is there."""
        with _translated(f"{self.url}/{name}"):
            self._files.pipe_file(f"{self.root}/{name}", data)

    def write_new(self, name: str, data: bytes) -> bool:
        """Writes a small file; False where there is one already. Where the store knows no
        conditional writes, of two that write at once the later one holds."""
        with _translated(f"{self.url}/{name}"):
            if self._files.exists(f"{self.root}/{name}"):
                return False
            try:
                self._files.pipe_file(f"{self.root}/{name}", data, mode="create")
            except OSError:  # s3fs names no type for a condition that was not met
                if self._files.exists(f"{self.root}/{name}"):
                    return False
                raise
        return True

    def remove(self, name: str) -> None:
        """Removes a file."""
        with _translated(f"{self.url}/{name}"):
            self._files.rm_file(f"{self.root}/{name}")

    def remove_folder(self, name: str) -> None:
        """Removes an empty folder, where the file system has folders."""
        with contextlib.suppress(NotImplementedError, OSError):
            self._files.rmdir(f"{self.root}/{name}")


def _open(url: str) -> tuple[Any, str]:
    """The file system of ``url`` and the folder's path on it."""
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise StoreError(f"{url}: a remote store needs fsspec: {EXTRA}") from error
    options = _options(url)
    try:
        files, root = url_to_fs(url, **options)
    except ImportError as error:
        raise StoreError(f"{url}: this kind of store is not installed: {EXTRA}") from error
    except ValueError as error:
        raise StoreError(f"{url}: not a store: {_line(error)}") from error
    return files, root.rstrip("/")


def _options(url: str) -> dict[str, Any]:
    from fsspec.config import conf

    # What was listed a minute ago is not what is there now.
    options: dict[str, Any] = {"use_listings_cache": False}
    if url.startswith(("file://", "local://")):
        options["auto_mkdir"] = True
    if url.startswith(("s3://", "s3a://")):
        # Some servers give the checksum of the whole object with a part of it, which botocore
        # then refuses; every byte is checked against the manifest anyway.
        configured = conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {"response_checksum_validation": "when_required"} | configured
    return options


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Errors of any file system as StoreError, led by ``where``.

    Exception, because the libraries under fsspec share no base class: botocore's errors are not
    aiohttp's, nor is either OSError always.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(f"{where}: does not exist") from error
    except Exception as error:
        raise UnreachableError(f"{where}: the remote store says: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
