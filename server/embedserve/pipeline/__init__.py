"""Request pipeline of a process, shared by all protocols.

The pipeline admits a request, decodes its body, and enqueues it with its model. When the vectors
are available it encodes them, writes the bytes, and counts the request. A protocol is a small
adapter: it implements ResponseWriter and creates a RequestContext for each request. It never sees
ids.
"""

from embedserve.pipeline.request_context import (
    LARGE_RESPONSE_BYTES,
    ROUTING_KEY,
    RequestContext,
    RequestOptions,
)
from embedserve.pipeline.request_pipeline import (
    ORIGIN,
    UPLOAD_S_MAX,
    RequestPipeline,
    late_request,
)
from embedserve.pipeline.response_writer import ResponseWriter

__all__ = [
    "LARGE_RESPONSE_BYTES",
    "ORIGIN",
    "ROUTING_KEY",
    "UPLOAD_S_MAX",
    "RequestContext",
    "RequestOptions",
    "RequestPipeline",
    "ResponseWriter",
    "late_request",
]
