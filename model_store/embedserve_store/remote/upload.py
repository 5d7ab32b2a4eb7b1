"""Uploads a version to a remote store, with its manifest last.

Readers do not see the version before its manifest exists. Each byte is checked while it passes, and
the files appear together once all of them are right. Never overwrites a version. Never imports
torch.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from embedserve_store.errors import MissingFileError, StoreError
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.format.version_folder import VERSION_PATTERN
from embedserve_store.local_store import LocalStore
from embedserve_store.remote import remote_files
from embedserve_store.remote.multipart_upload import MultipartUpload, StalePartsError
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.unchanged_tables import find_unchanged
from embedserve_store.transfer.file_check import MANIFEST, TABLES
from embedserve_store.transfer.receive import TransferProgress
from embedserve_store.transfer.stored_version import SMALL_FILE_BYTES_MAX, StoredVersion

logger = logging.getLogger(__name__)

CLAIMS = ".uploads"
"""Folder beside the versions: a file for each number under which a publisher uploads."""


def upload_version(
    folder: str | os.PathLike[str],
    url: str,
    number: int | None = None,
    progress: TransferProgress | None = None,
) -> str:
    """Uploads STORE/MODEL/VERSION to URL/MODEL/NUMBER, and returns the URL of the version.

    Args:
        folder: folder of a published version.
        url: URL of the store, such as s3://bucket/folder. The bucket must exist.
        number: version number in the remote store; upload_next chooses a free one. Default: the
            folder's number.

    Raises:
        StoreError: ``folder`` is not a version or is damaged, or the number is taken.
        UnreachableError: the store cannot be written.
    """
    return send(_local(folder), RemoteFolder(url), number, progress)


def upload_next(
    folder: str | os.PathLike[str],
    url: str,
    first: int,
    progress: TransferProgress | None,
    check: Callable[[], None] | None,
) -> int:
    """Uploads STORE/MODEL/VERSION to URL/MODEL under the lowest free number, and returns it.

    Other publishers that upload the model at the same time get other numbers, unless they upload
    the same files: then only the first to end succeeds.

    Args:
        first: lowest number to try, as RemoteStore.next_version returns it.
        folder, url, progress: as upload_version.
        check: is called directly before the manifest is written; no version appears if it raises.

    Raises:
        StoreError, UnreachableError: as upload_version.
    """
    version, remote = _local(folder), RemoteFolder(url)
    with _claimed_number(version, remote, first) as number:
        send(version, remote, number, progress, check)
    return number


def _local(folder: str | os.PathLike[str]) -> StoredVersion:
    path = Path(folder).absolute()
    if not VERSION_PATTERN.fullmatch(path.name):
        raise StoreError(f"{folder}: not a published version: its name is not a number")
    return LocalStore(path.parent.parent).stored(path.parent.name, int(path.name))


@contextmanager
def _claimed_number(version: StoredVersion, remote: RemoteFolder, first: int) -> Iterator[int]:
    """Yields the lowest free number from ``first`` on, which no other upload gets meanwhile.

    A claim that a killed upload left is taken over by an upload of the same files, which continues
    it, and passed over by any other. So is the claim of an upload that still runs.
    """
    claim = replace(version.manifest, version=0, source={}).fingerprint.encode()
    for number in itertools.count(first):
        path = f"{version.model}/{CLAIMS}/{number}"
        if not _claim(remote, path, claim):
            continue
        try:
            # Another upload may have ended, and withdrawn its claim, since ``first`` was found.
            if not remote.has(f"{version.model}/{number}/{MANIFEST}"):
                yield number
                return
        finally:
            try:
                remote.remove(path)
            except StoreError as error:
                logger.warning("%s: the claim of version %d stays: %s", remote.url, number, error)


def _claim(remote: RemoteFolder, path: str, claim: bytes) -> bool:
    """Writes a claim. Returns False if there is one of another upload."""
    if remote.write_new(path, claim):
        return True
    try:
        return remote.read(path, SMALL_FILE_BYTES_MAX) == claim
    except MissingFileError:  # that upload has ended meanwhile
        return False


def send(
    version: StoredVersion,
    remote: RemoteFolder,
    number: int | None = None,
    progress: TransferProgress | None = None,
    check: Callable[[], None] | None = None,
) -> str:
    """Uploads ``version`` of any store, and returns its URL; see upload_version.

    An upload to S3 that was interrupted is continued: its parts are used if their checksums are
    right. The store copies the tables that find_unchanged finds in another version, if it can.
    Of two concurrent uploads under one number the second fails. On S3 it replaces nothing if the
    first has ended before the second has sent its bytes. Otherwise they may mix their files, and
    every reader then rejects the version: an object store has no rename that fails for the second
    upload. upload_next excludes that, as only uploads of the same files share a number.
    """
    number = version.number if number is None else number
    target = f"{version.model}/{number}"
    _check_free(remote, target)
    finish = [_send_file(version, name, remote, target, progress) for name in version.files]
    _check_free(remote, target)  # another upload may have ended, and its objects would be replaced
    for finish_file in finish:
        finish_file()
    for name, size in version.files.items():
        arrived = remote.size(f"{target}/{name}", read_bytes=size)
        if arrived != size:
            raise StoreError(f"{remote.url}/{target}/{name}: {arrived} bytes arrived of {size}")
    data = version.manifest_json
    if number != version.number:
        data = sealed_json(json.loads(data) | {"version": number})
    if check is not None:
        check()
    path = f"{target}/{MANIFEST}"
    # A store whose response was lost has the manifest, and says so when it is asked again.
    if not remote.write_new(path, data) and remote.read(path, SMALL_FILE_BYTES_MAX) != data:
        raise _taken(remote, target)
    return f"{remote.url}/{target}"


def _send_file(
    version: StoredVersion,
    name: str,
    remote: RemoteFolder,
    target: str,
    progress: TransferProgress | None,
) -> Callable[[], None]:
    """Sends the bytes of a file, and returns the function that makes the object appear.

    Where objects do not appear at once, the returned function does nothing. Readers ignore objects
    without a manifest.
    """
    size, path = version.files[name], f"{target}/{name}"
    if not remote.has_s3_calls:
        remote.upload(path, _checked(version, name, progress))
        return lambda: None
    if size <= remote_files.PART_BYTES:
        data = b"".join(_checked(version, name, progress))
        return lambda: remote.write(path, data)
    number = int(target.rpartition("/")[2])
    unchanged = find_unchanged(remote, version, number) if name == TABLES else None

    def send_parts(*, is_resumed: bool) -> Callable[[], None]:
        upload = MultipartUpload(remote, path, size, is_resumed=is_resumed, unchanged=unchanged)
        try:
            upload.send(_checked(version, name, progress))
        except DamagedError:
            upload.abort()
            raise
        return upload.complete

    try:
        return send_parts(is_resumed=True)
    except StalePartsError:
        return send_parts(is_resumed=False)


def _checked(
    version: StoredVersion, name: str, progress: TransferProgress | None
) -> Iterator[bytes]:
    """Yields the bytes of a file; raises DamagedError at its end if they are not as published."""
    check = version.check(name)
    bytes_done = 0
    for block in version.blocks(name, 0, version.files[name]):
        check.update(block)
        yield block
        bytes_done += len(block)
        if progress:
            progress(name, bytes_done, version.files[name])
    if problem := check.problem():
        raise DamagedError(problem)


class DamagedError(StoreError):
    """A file differs from what was published."""


def _check_free(remote: RemoteFolder, target: str) -> None:
    if remote.has(f"{target}/{MANIFEST}"):
        raise _taken(remote, target)


def _taken(remote: RemoteFolder, target: str) -> StoreError:
    return StoreError(f"{remote.url}/{target}: exists already, and versions never change")
