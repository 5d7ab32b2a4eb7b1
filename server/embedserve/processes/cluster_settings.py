"""Options of `embedserve cluster`. The command line makes a flag of each."""

from __future__ import annotations

from dataclasses import dataclass

from embedserve.config import LIMIT_MAX, ServeSettings, setting


@dataclass(frozen=True)
class ClusterSettings:
    """Options of `embedserve cluster`; those of the same name are settings of the router."""

    store: str
    model: tuple[str, ...] = setting(
        (),
        "Model to serve, as for serve. Repeatable. Default: the newest version of every model in "
        "the store.",
    )
    replicas: int = setting(1, "Shards for each part.", min=1, max=16)
    http_port: int = setting(
        8000, "The router's port for REST, health and metrics.", min=0, max=65535
    )
    grpc_port: int = setting(8001, "The router's port for gRPC.", min=0, max=65535)
    follow: str = setting("none", "none, alias or latest, as for serve.")
    cache: str = setting(
        "",
        "Folder for versions pulled from a remote store. Default: ~/.cache/embedserve.",
        envvar="EMBEDSERVE_CACHE",
    )
    backend: str = setting("local", "Where the shards run: local, this host; ray, a Ray cluster.")
    name: str = setting("embedserve", "Name of the shards in Ray, for serve --shards ray:NAME.")
    ray_address: str = setting(
        "auto",
        "HOST:PORT of Ray's head node; auto: the cluster that this host is a node of.",
        envvar="RAY_ADDRESS",
    )
    shard_memory: str = setting(
        "", "Memory that each shard reserves in Ray, such as 400GB. Default: none."
    )
    shard_timeout_ms: float = setting(
        ServeSettings.shard_timeout_ms,
        "Milliseconds that the router waits for one call to a shard.",
        min=1,
        max=LIMIT_MAX,
    )
    shard_config: str = setting(
        "",
        "TOML file with settings of each shard, as for serve --config. With Ray it is on each "
        "node.",
    )
    router_config: str = setting(
        "", "TOML file with settings of the router, as for serve --config."
    )
