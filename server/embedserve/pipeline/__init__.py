"""Request pipeline of a process, shared by all protocols.

A protocol is a small adapter: it creates a RequestContext for each request, authenticates its
caller, submits it with its body, and implements ResponseWriter. It never sees ids. The
pipeline checks the deadline and the queue, decodes the body, and enqueues the request with its
model. When the vectors are available it encodes them, hands the bytes to the writer, and counts the
request.
"""

from embedserve.pipeline.codec_executor import decode_later
from embedserve.pipeline.request_pipeline import (
    LARGE_RESPONSE_BYTES,
    ORIGIN_HEADER,
    ROUTING_KEY,
    RequestContext,
    RequestOptions,
    RequestPipeline,
)
from embedserve.pipeline.response_writer import UPLOAD_S_MAX, ResponseWriter, late_request

__all__ = [
    "LARGE_RESPONSE_BYTES",
    "ORIGIN_HEADER",
    "ROUTING_KEY",
    "UPLOAD_S_MAX",
    "RequestContext",
    "RequestOptions",
    "RequestPipeline",
    "ResponseWriter",
    "decode_later",
    "late_request",
]
