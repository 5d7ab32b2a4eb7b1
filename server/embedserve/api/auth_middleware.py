"""Authenticates callers of the management routes, and defines the roles that each route
requires."""

from __future__ import annotations

import logging
from functools import partial

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from embedserve.access.authenticator import CALLER, CERTIFICATE, Authenticator, headers_by_name
from embedserve.access.client_address import PEER, ClientAddresses
from embedserve.access.grants import CALLERS
from embedserve.api.console.routes import PAGE_PATHS
from embedserve.codec.json_codec import encode_error
from embedserve.codec.open_inference.body_responses import encode_error as encode_infer_error
from embedserve.codec.open_inference.body_responses import is_infer_path
from embedserve.errors import EmbedServeError
from embedserve.metrics.rate_limited_logger import Fields, RateLimitedLogger
from embedserve.metrics.request_metrics import LINES_MAX
from embedserve.tracing.request_id import REQUEST_ID, request_id_of

logger = logging.getLogger("embedserve.requests")

PATH_CHARACTERS_MAX = 200
"""Characters of a request's path that are logged."""
NO_ROLES: frozenset[str] = frozenset()
"""Roles of a path that everybody may request."""
ADMINS = frozenset({"admin"})


def roles_of(path: str) -> frozenset[str]:
    """Returns the roles that may request ``path``; any one is enough, and an empty set admits
    everybody.

    Probes have no tokens, and the console's page prompts for a token itself. Every caller may
    request all paths below /models/ and /v2/; a path that is not listed is for administrators only.
    """
    if (
        path == "/"
        or path in PAGE_PATHS
        or path.removeprefix("/v2") in ("/health/live", "/health/ready")
    ):
        return NO_ROLES
    if path in ("/models", "/v2") or path.startswith(("/models/", "/v2/")):
        return CALLERS
    return ADMINS


class AuthMiddleware:
    """ASGI middleware that rejects callers without a required role."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, addresses: ClientAddresses
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._addresses = addresses
        self._log = RateLimitedLogger(logger, LINES_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        roles = roles_of(scope["path"]) if scope["type"] == "http" else NO_ROLES
        app = self._app
        if roles:
            authorization = headers_by_name(scope["headers"]).get(b"authorization")
            try:
                certificate = scope.get(CERTIFICATE)
                scope[CALLER] = self._authenticator.check(authorization, certificate, roles)
            except EmbedServeError as error:
                app = error_response(error, error.http_status, scope)
                fields = partial(self._fields, scope)
                self._log.log(
                    logging.INFO, f"rejected with {error.code}", error.message, fields=fields
                )
        await app(scope, receive, send)

    def _fields(self, scope: Scope) -> Fields:
        """Returns the fields logged for a rejected request, besides the reason."""
        header = headers_by_name(scope["headers"]).get
        address = self._addresses.find(scope.get(PEER, ""), header)
        path = scope["path"][:PATH_CHARACTERS_MAX]
        return {"address": address, "method": scope["method"], "path": path}


def error_response(error: EmbedServeError, status: int, scope: Scope) -> Response:
    """Returns ``error`` as the response to the request in ``scope``, whose path selects the format:
    the JSON of all errors, or that of the Open Inference Protocol."""
    given_id = headers_by_name(scope["headers"]).get(REQUEST_ID)
    headers = {"X-Request-Id": request_id_of(given_id).decode()}
    if error.retry_after_s:
        headers["Retry-After"] = str(error.retry_after_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    encode = encode_infer_error if is_infer_path(scope["path"]) else encode_error
    return Response(encode(error), status, headers, media_type="application/json")
