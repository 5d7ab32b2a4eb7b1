"""Uploads a large object to S3 in parts, and continues an upload that was interrupted.

The object appears when the upload completes. A killed upload leaves its parts in the bucket; the
next upload of the object keeps those whose MD5 is right. Parts that another object of the store
has, too, are copied by the store if it can (UploadPartCopy). Never imports torch.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

from embedserve_store.errors import MissingFileError, StoreError
from embedserve_store.remote import remote_files
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.transfer_pool import TransferPool
from embedserve_store.remote.unchanged_tables import UnchangedBytes

logger = logging.getLogger(__name__)

PARTS_MAX = 10_000
"""Most parts that S3 accepts for an object."""


class StalePartsError(StoreError):
    """The parts of an interrupted upload are those of other bytes."""


class MultipartUpload:
    """Upload of one object of ``size`` bytes. The parts have one size, except the last.

    Args:
        is_resumed: whether the parts of an earlier upload of this object are used.
        unchanged: bytes that another object of the store has, too.

    Raises:
        UnreachableError: the store cannot be written. Every method raises it.
    """

    def __init__(
        self,
        remote: RemoteFolder,
        name: str,
        size: int,
        *,
        is_resumed: bool,
        unchanged: UnchangedBytes | None = None,
    ) -> None:
        self._remote = remote
        self._name = name
        self._where = f"{remote.url}/{name}"
        self._size = size
        self._part_bytes = max(remote_files.PART_BYTES, -(-size // PARTS_MAX))
        self._etags: dict[int, str] = {}
        self._there: dict[int, str] = {}
        # Before _can_copy: if its trial upload cannot be aborted, that would be found as the last.
        found = self._find() if is_resumed else None
        self._unchanged = unchanged if unchanged and self._can_copy(unchanged) else None
        self._copied: set[int] = set()
        if found is None:
            self._id = str(self._call("create_multipart_upload")["UploadId"])
        else:
            self._id = found
            self._there = self._list_parts()
            logger.info("%s: %d parts are there", self._where, len(self._there))

    def send(self, blocks: Iterator[bytes]) -> None:
        """Uploads the bytes of the object, except the parts that are there.

        Raises:
            StalePartsError: the parts that are there are those of other bytes.
            StoreError: as ``blocks`` raises it.
        """
        with TransferPool(remote_files.PARTS_AT_ONCE, "upload") as pool:
            sent: set[Future[None]] = set()
            for number, data in enumerate(_parts(blocks, self._part_bytes), start=1):
                if len(sent) == remote_files.PARTS_AT_ONCE:
                    done, sent = wait(sent, return_when="FIRST_COMPLETED")
                    for part in done:
                        part.result()
                sent.add(pool.submit(self._send_part, number, data))
            for part in sent:
                part.result()
        if self._copied:
            counts = len(self._copied), len(self._etags)
            logger.info("%s: the store copied %d of %d parts", self._where, *counts)

    def _send_part(self, number: int, data: bytes) -> None:
        if number in self._there:
            if self._there[number] != _md5(data):
                raise StalePartsError(f"{self._where}: part {number} differs")
            self._etags[number] = self._there[number]
            return
        if self._copy_part(number, data):
            return
        # Some stores write parts in their order, and confirm a part once it is written. They reject
        # the object if a part came again meanwhile.
        answer = self._call(
            "upload_part",
            read_bytes=self._part_bytes,
            UploadId=self._id,
            PartNumber=number,
            Body=data,
        )
        self._etags[number] = answer["ETag"]

    def _copy_part(self, number: int, data: bytes) -> bool:
        """Makes the store copy a part. Returns False if it has to be sent.

        After the first part that the store does not copy, no other is tried.
        """
        unchanged = self._unchanged
        start = (number - 1) * self._part_bytes
        at = unchanged.find(start, start + len(data)) if unchanged else None
        if unchanged is None or at is None:
            return False
        where = f"{self._where}: part {number}"
        try:
            etag = self._copy(unchanged.path, at, len(data), self._id, number)
        except StoreError as error:
            logger.info("%s: %s; the other parts are sent", where, error)
            self._unchanged = None
            return False
        if etag.strip('"') != _md5(data):
            logger.info("%s: copied as %s, not by its MD5; the other parts are sent", where, etag)
            self._unchanged = None
            return False
        self._etags[number] = etag
        self._copied.add(number)
        return True

    def _copy(self, path: str, start: int, count: int, upload_id: str, number: int) -> str:
        """Copies ``count`` bytes of an object into a part, and returns the part's ETag.

        Raises:
            StoreError: the store does not copy.
        """
        bucket, key = self._remote.bucket_and_key(path)
        answer = self._call(
            "upload_part_copy",
            read_bytes=self._part_bytes,
            UploadId=upload_id,
            PartNumber=number,
            CopySource={"Bucket": bucket, "Key": key},
            CopySourceRange=f"bytes={start}-{start + count - 1}",
        )
        try:
            return str(answer["CopyPartResult"]["ETag"])
        except KeyError as error:
            raise StoreError(f"{self._remote.url}: copies no parts") from error

    def _can_copy(self, unchanged: UnchangedBytes) -> bool:
        """Returns whether the store copies parts, by an upload that is then aborted.

        A store that does not know the operation may take it for an upload of an empty part. Some
        stores then refuse the right bytes of that part.
        """
        first, last, at = unchanged.ranges[0]
        try:
            upload_id = str(self._call("create_multipart_upload")["UploadId"])
            try:
                self._copy(unchanged.path, at, min(last - first, self._part_bytes), upload_id, 1)
            finally:
                self._call("abort_multipart_upload", UploadId=upload_id)
        except StoreError as error:
            logger.info("%s; all parts are sent", error)
            return False
        return True

    def complete(self) -> None:
        """Makes the object appear."""
        parts = [{"PartNumber": n, "ETag": self._etags[n]} for n in sorted(self._etags)]
        before_s = self._object_s()
        try:
            self._call(
                "complete_multipart_upload",
                read_bytes=self._size,
                UploadId=self._id,
                MultipartUpload={"Parts": parts},
            )
        except MissingFileError:
            # If the response was lost, the request came again, and many stores do not know an
            # upload any more that they have completed.
            if self._object_s() in (None, before_s):
                raise

    def _object_s(self) -> float | None:
        """Returns when the object was written, as RemoteFolder.modified_s; None if there is
        none."""
        try:
            return self._remote.modified_s(self._name, read_bytes=self._size)
        except MissingFileError:
            return None

    def abort(self) -> None:
        """Removes the parts."""
        self._call("abort_multipart_upload", UploadId=self._id)

    def _find(self) -> str | None:
        """Returns the id of the last upload of this object that was interrupted; None if none."""
        _, key = self._remote.bucket_and_key(self._name)
        try:
            answer = self._call("list_multipart_uploads", Prefix=key)
        except StoreError as error:  # such as without the permission to list them
            logger.info("%s; nothing of an earlier upload is used", error)
            return None
        uploads = [one for one in answer.get("Uploads", ()) if one["Key"] == key]
        return str(max(uploads, key=lambda one: one["Initiated"])["UploadId"]) if uploads else None

    def _list_parts(self) -> dict[int, str]:
        """Returns the MD5 of the parts that are there, by number."""
        parts: dict[int, str] = {}
        marker = 0
        while True:
            answer = self._call("list_parts", UploadId=self._id, PartNumberMarker=marker)
            for part in answer.get("Parts", ()):
                parts[part["PartNumber"]] = part["ETag"].strip('"')
            if not answer.get("IsTruncated"):
                return parts
            marker = answer["NextPartNumberMarker"]

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        return self._remote.s3_call(operation, self._name, **arguments)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _parts(blocks: Iterator[bytes], part_bytes: int) -> Iterator[bytes]:
    """Yields ``blocks`` in pieces of ``part_bytes``, the last one shorter."""
    rest = bytearray()
    for block in blocks:
        rest += block
        while len(rest) >= part_bytes:
            yield bytes(memoryview(rest)[:part_bytes])
            del rest[:part_bytes]
    if rest:
        yield bytes(rest)
