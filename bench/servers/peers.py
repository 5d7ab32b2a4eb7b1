"""List of the peers; each has its own module."""

from __future__ import annotations

from servers.base import Server
from servers.bentoml_peer import BentoMl
from servers.fastapi_peer import FastApi, TypedFastApi
from servers.litserve_peer import LitServe
from servers.mosec_peer import Mosec
from servers.ray_peer import RayServe
from servers.redis_peer import Redis
from servers.triton import Triton


def peers() -> list[Server]:
    return [
        Triton(),
        Redis(),
        Mosec(),
        FastApi(),
        TypedFastApi(),
        LitServe(),
        BentoMl(),
        RayServe(),
    ]
