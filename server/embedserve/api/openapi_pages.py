"""Has browsers load nothing from elsewhere for the OpenAPI pages: ReDoc asks for a logo."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS = ("/docs", "/redoc")
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline'",  # both pages begin with a script of their own
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "worker-src blob:",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)


class OpenApiPages:
    """The ASGI application, with a policy on these pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode())
                message["headers"] = [*message["headers"], policy]
            await send(message)

        is_page = scope["type"] == "http" and scope["path"] in PATHS
        await self._app(scope, receive, send_with_policy if is_page else send)
