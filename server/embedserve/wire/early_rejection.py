"""Record of requests that are rejected before they have a RequestContext."""

from __future__ import annotations

from embedserve.access.authenticator import headers_by_name, one_header
from embedserve.metrics.metrics import ProtocolMetrics
from embedserve.metrics.rate_limited_logger import Fields
from embedserve.pipeline import RequestPipeline
from embedserve.tracing.request_id import REQUEST_ID, HeaderList, request_id_header
from embedserve.wire.http_stream import Headers


def record_early_rejection(
    pipeline: RequestPipeline,
    metrics: ProtocolMetrics,
    code: str,
    message: str,
    headers: Headers,
    peer: str,
    seconds: float = 0.0,
) -> HeaderList:
    """Counts and logs a request that is rejected before it has a RequestContext.

    Args:
        pipeline: request pipeline.
        metrics: metrics of the protocol.
        code: code of the error.
        message: message of the error.
        headers: headers of the request.
        peer: address of the connection's other end.
        seconds: duration of the request.

    Returns:
        extra headers of the response: the request id.
    """
    extra_headers = request_id_header(one_header(headers, REQUEST_ID))
    request_id = extra_headers[0][1].decode("ascii")

    def fields() -> Fields:
        address = pipeline.addresses.find(peer, headers_by_name(headers).get)
        return {"request_id": request_id, "address": address, "protocol": metrics.protocol}

    metrics.count_rejected(code, message, seconds, fields)
    return extra_headers
