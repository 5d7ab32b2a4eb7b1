"""Administrators' routes that stop a running server from applying deltas, and let it apply them
again.

Every worker serves them. The applier, another process, reads the hold at its next poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel, Field

from embedserve.access.authenticator import CLIENT
from embedserve.api.admin import check_json
from embedserve.deltas.status import HELD, SharedDeltaState
from embedserve.errors import InvalidRequestError
from embedserve.models.model_registry import ModelRegistry

logger = logging.getLogger(__name__)

EFFECT_S_MAX = 10.0
"""Seconds that a response waits for the applier to see the hold, as long as an unload may take. A
step in progress is completed first, and the applier may be starting anew."""
CHECK_S = 0.02
"""Seconds between two readings of the status, which take some microseconds."""


class FollowedName(BaseModel):
    """The model whose deltas are held, or held no longer."""

    model: str = Field(
        description="Name that the model is served by.", min_length=1, max_length=1000
    )


class DeltaProgress(BaseModel):
    """State of a model's deltas."""

    model: str
    state: str = Field(description="As in /models.")
    seq: int = Field(description="Last delta whose rows are served; 0 for none.")


def add_delta_hold(app: FastAPI, served: ModelRegistry) -> None:
    """Adds the routes to ``app``. The routes do not check roles; AuthMiddleware does."""
    json_only = [Depends(check_json)]

    def followed_model(name: str) -> SharedDeltaState:
        followed = served.model(name).deltas
        if followed is None:
            raise InvalidRequestError(
                f"model is {name!r}, which follows no deltas (serve --deltas follow)", "model"
            )
        return followed

    async def switch(name: str, request: Request, *, is_held: bool) -> DeltaProgress:
        model, _ = served.model(name), followed_model(name)
        caller = request.scope.get(CLIENT)
        by = f" by {caller.grant.name!r}" if caller is not None else ""
        action = "hold" if is_held else "go-on"
        logger.info("%s: deltas %s, as requested%s", model.served_as, action, by)
        await _switch(partial(followed_model, name), is_held=is_held)
        now = followed_model(name).status.read()
        return DeltaProgress(model=model.served_as, state=now.state, seq=now.applied.seq)

    @app.post(
        "/admin/deltas/hold",
        summary="Stop applying deltas",
        tags=["admin"],
        dependencies=json_only,
    )
    async def hold_deltas(name: FollowedName, request: Request) -> DeltaProgress:
        """Holds the deltas of a model: its rows stay as they are, in all workers, until they are
        held no longer or the server restarts. A step in progress is completed. Responds with the
        state `held` once that is so, or after ten seconds with the present state."""
        return await switch(name.model, request, is_held=True)

    @app.post(
        "/admin/deltas/go-on",
        summary="Apply deltas again",
        tags=["admin"],
        dependencies=json_only,
    )
    async def apply_deltas(name: FollowedName, request: Request) -> DeltaProgress:
        """Ends the hold of a model's deltas. Those that wait are applied."""
        return await switch(name.model, request, is_held=False)


async def _switch(find: Callable[[], SharedDeltaState], *, is_held: bool) -> None:
    """Sets or ends a hold, and waits until the applier has looked at the store with it, or until
    somebody reverses it.

    Args:
        find: returns the served version. If it is another one meanwhile, that gets the hold.
    """
    requested_at = time.time()
    before: SharedDeltaState | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EFFECT_S_MAX):
            while True:
                if (followed := find()) is not before:
                    followed.hold.set(is_held)
                    before = followed
                now = followed.status.read()
                is_effective = now.looked_at >= requested_at and (now.state == HELD) == is_held
                if is_effective or followed.hold.is_set != is_held:
                    return
                await asyncio.sleep(CHECK_S)
