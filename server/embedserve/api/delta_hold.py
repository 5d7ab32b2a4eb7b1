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

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from embedserve.access.authenticator import CALLER
from embedserve.api.admin import check_json
from embedserve.api.dependencies import ModelsDep
from embedserve.deltas.status import HELD, SharedDeltaState
from embedserve.errors import InvalidRequestError
from embedserve.models.model_registry import ModelRegistry

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/admin/deltas", tags=["admin"], dependencies=[Depends(check_json)])
"""The routes. They do not check roles; AuthMiddleware does."""

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


def _shared_state(served: ModelRegistry, name: str) -> SharedDeltaState:
    shared = served.model(name).deltas
    if shared is None:
        raise InvalidRequestError(
            f"model is {name!r}, which follows no deltas (serve --deltas follow)", "model"
        )
    return shared


@router.post("/hold", summary="Stop applying deltas")
async def hold_deltas(name: FollowedName, request: Request, served: ModelsDep) -> DeltaProgress:
    """Holds the deltas of a model: its rows stay as they are, in all workers, until they are held
    no longer or the server restarts. A step in progress is completed. Responds with the state
    `held` once that is so, or after ten seconds with the present state."""
    return await _set_hold(served, name.model, request, is_held=True)


@router.post("/go-on", summary="Apply deltas again")
async def apply_deltas(name: FollowedName, request: Request, served: ModelsDep) -> DeltaProgress:
    """Ends the hold of a model's deltas. Those that wait are applied."""
    return await _set_hold(served, name.model, request, is_held=False)


async def _set_hold(
    served: ModelRegistry, name: str, request: Request, *, is_held: bool
) -> DeltaProgress:
    find = partial(_shared_state, served, name)
    model, _ = served.model(name), find()
    caller = request.scope.get(CALLER)
    by = f" by {caller.grant.name!r}" if caller is not None else ""
    action = "hold" if is_held else "go-on"
    logger.info("%s: deltas %s, as requested%s", model.served_as, action, by)
    await _set_and_wait(find, is_held=is_held)
    now = find().status.read()
    return DeltaProgress(model=model.served_as, state=now.state, seq=now.applied.seq)


async def _set_and_wait(find: Callable[[], SharedDeltaState], *, is_held: bool) -> None:
    """Sets or ends a hold, and waits until the applier has looked at the store with it, or until
    somebody reverses it.

    Args:
        find: returns the state of the served version's deltas. If another version serves meanwhile,
            it gets the hold.
    """
    requested_at = time.time()
    before: SharedDeltaState | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EFFECT_S_MAX):
            while True:
                if (shared := find()) is not before:
                    shared.hold.set(is_held)
                    before = shared
                now = shared.status.read()
                is_effective = now.looked_at >= requested_at and (now.state == HELD) == is_held
                if is_effective or shared.hold.is_set != is_held:
                    return
                await asyncio.sleep(CHECK_S)
