"""Request pipeline of a process, shared by all protocols.

The pipeline admits a request, decodes its body, and enqueues it with its model. When the vectors
are available it encodes them, writes the bytes, and counts the request. A protocol is a small
adapter: it implements ResponseWriter and creates a RequestContext for each request. It never sees
ids.
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
