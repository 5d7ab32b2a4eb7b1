"""Content-Security-Policy for the OpenAPI pages: browsers load nothing from other hosts, such as
the logo that ReDoc requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS = ("/docs", "/redoc")
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline'",  # both pages start with an inline script
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "worker-src blob:",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)


class OpenApiPagesMiddleware:
    """ASGI middleware that adds the policy to the OpenAPI pages. It also makes the URLs in them
    relative, because proxies may put a prefix before the paths of this server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode())
                message["headers"] = [*message["headers"], policy]
            await send(message)

        if scope["type"] == "http" and scope["path"] in PATHS:
            await self._app({**scope, "root_path": "."}, receive, send_with_policy)
        else:
            await self._app(scope, receive, send)
