"""Record of requests that are rejected before they have a RequestContext."""

from __future__ import annotations

from embedserve.access.authenticator import LIST_HEADERS, headers_by_name
from embedserve.metrics.rate_limited_logger import Fields
from embedserve.metrics.request_metrics import ProtocolMetrics
from embedserve.pipeline import RequestPipeline
from embedserve.tracing.request_id import REQUEST_ID, ExtraHeaders, request_id_header, usable_id
from embedserve.wire.http_stream import Headers


class EarlyRejection:
    """Rejection of all requests with the same headers, before they have a RequestContext.

    HTTP/2 caches it, so it keeps only the headers that it needs.
    """

    __slots__ = ("_code", "_forwarded", "_given_id", "_message", "_metrics", "_pipeline")

    def __init__(
        self,
        pipeline: RequestPipeline,
        metrics: ProtocolMetrics,
        code: str,
        message: str,
        headers: Headers,
    ) -> None:
        self._pipeline = pipeline
        self._metrics = metrics
        self._code = code
        self._message = message
        by_name = headers_by_name(headers)
        self._given_id = usable_id(by_name.get(REQUEST_ID))
        self._forwarded = {name: by_name[name] for name in LIST_HEADERS & by_name.keys()}

    def record(self, peer: str, seconds: float = 0.0) -> ExtraHeaders:
        """Counts and logs a rejected request.

        Args:
            peer: address of the connection's other end.
            seconds: duration of the request.

        Returns:
            extra headers of the response: the request id.
        """
        extra_headers = request_id_header(self._given_id)
        request_id = extra_headers[0][1].decode("ascii")

        def fields() -> Fields:
            address = self._pipeline.addresses.find(peer, self._forwarded.get)
            protocol = self._metrics.protocol
            return {"request_id": request_id, "address": address, "protocol": protocol}

        self._metrics.count_rejected(self._code, self._message, seconds, fields)
        return extra_headers
