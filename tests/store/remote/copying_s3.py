"""Proxy that adds UploadPartCopy, as AWS and MinIO have it, to an S3 server without it."""

import hashlib
import re
from urllib.parse import parse_qs, unquote, urlsplit

import botocore.session
from store.remote.s3_proxy import Response, S3Proxy
from store.remote.s3_server import KEY, SECRET

RESULT = "<CopyPartResult><ETag>{}</ETag></CopyPartResult>"
XML = {"Content-Type": "application/xml"}


class CopyingStore:
    """Counts the bytes that clients send and the bytes that it copies.

    Args:
        is_wrong: whether copies have wrong bytes. Parts can then be sent again, which the server
            behind it would reject.
        error: HTTP status and S3 code of the response to every copy, in place of the copy.
        can_abort: whether uploads may be aborted.

    Attributes:
        sent: bytes of the parts that were sent.
        copied: bytes of the parts that were copied.
        tried: number of copies that were requested.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        is_wrong: bool = False,
        error: tuple[int, str] | None = None,
        can_abort: bool = True,
    ) -> None:
        self.sent = self.copied = self.tried = 0
        self._is_wrong = is_wrong
        self._error = error
        self.can_abort = can_abort
        self._client = botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )

    def handler(self) -> type[S3Proxy]:
        store = self

        class Copying(S3Proxy):
            def respond(self, body: bytes) -> Response:
                if self.command == "DELETE" and "uploadId=" in self.path and not store.can_abort:
                    return 403, XML, b"<Error><Code>AccessDenied</Code></Error>"
                if self.command != "PUT" or "partNumber=" not in self.path:
                    return self.forward(body)
                if source := self.headers.get("x-amz-copy-source"):
                    return store.copy(self.path, source, self.headers["x-amz-copy-source-range"])
                store.sent += len(body)
                return self.forward(body)

        return Copying

    def copy(self, path: str, source: str, wanted: str) -> Response:
        """Copies a part as requested; returns the response."""
        self.tried += 1
        if self._error:
            status, code = self._error
            return status, XML, f"<Error><Code>{code}</Code></Error>".encode()
        assert re.fullmatch(r"bytes=\d+-\d+", wanted)
        if self._is_wrong:
            return 200, XML, RESULT.format(hashlib.md5(b"other").hexdigest()).encode()
        bucket, _, key = unquote(source).removeprefix("/").partition("/")
        found = self._client.get_object(Bucket=bucket, Key=key, Range=wanted)["Body"].read()
        url = urlsplit(path)
        bucket, _, key = unquote(url.path).removeprefix("/").partition("/")
        query = parse_qs(url.query)
        answer = self._client.upload_part(
            Bucket=bucket,
            Key=key,
            UploadId=query["uploadId"][0],
            PartNumber=int(query["partNumber"][0]),
            Body=found,
        )
        self.copied += len(found)
        return 200, XML, RESULT.format(answer["ETag"]).encode()
