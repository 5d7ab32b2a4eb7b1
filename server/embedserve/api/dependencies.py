"""Dependencies of the route handlers: the parts of the server that they read.

``management_app`` and ``health_app`` put the parts into the state of their application. So each
route is declared once, on the router of its module, for all applications of a process.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from embedserve.models.model_registry import ModelRegistry
from embedserve.pipeline import RequestPipeline


# FastAPI would run functions that are not async in a thread.
async def _pipeline(request: Request) -> RequestPipeline:
    pipeline: RequestPipeline = request.app.state.pipeline
    return pipeline


async def _models(request: Request) -> ModelRegistry:
    return (await _pipeline(request)).models


PipelineDep = Annotated[RequestPipeline, Depends(_pipeline)]
"""Parameter of a handler that gets the pipeline of the server."""
ModelsDep = Annotated[ModelRegistry, Depends(_models)]
"""Parameter of a handler that gets the served models."""
