"""What is served, as the Open Inference Protocol asks for it: by a model's name and its version.

Between the exchange and the frontends of REST and gRPC, which tell the same.
"""

from __future__ import annotations

from typing import Any

from embedserve.access.access import Client
from embedserve.codec.open_inference import description
from embedserve.codec.open_inference.answers import versioned
from embedserve.exchange import Exchange
from embedserve.types import ModelInfo


def server_metadata(exchange: Exchange) -> dict[str, Any]:
    return description.server(has_shared_memory=exchange.shared_memory is not None)


def served(exchange: Exchange, name: str, version: str = "") -> ModelInfo:
    """Raises UnknownModelError if it is not."""
    return exchange.models.model(versioned(name, version))


def metadata(exchange: Exchange, name: str, version: str = "") -> dict[str, Any]:
    """The tensors of a model, and all its versions. Raises UnknownModelError."""
    info = served(exchange, name, version)
    versions = {one.version for one in exchange.models.models() if one.name == info.name}
    return description.model(info, [info.version] if version else sorted(versions))


def configuration(exchange: Exchange, name: str, version: str = "") -> dict[str, Any]:
    """As metadata, in the form of Triton's extension. Raises UnknownModelError."""
    return description.configuration(served(exchange, name, version))


def statistics(
    exchange: Exchange, name: str = "", version: str = "", client: Client | None = None
) -> list[dict[str, Any]]:
    """Returns the statistics of one version, of all versions of a model, or of all models where
    ``name`` is empty: of those that ``client`` may ask, and of all for administrators.

    Raises:
        UnknownModelError: there is no such model.
        PermissionDeniedError: ``client`` may not ask it.
    """
    infos = exchange.models.models()
    if client is not None and client.models is not None and "admin" not in client.grant.roles:
        if name:
            client.check_model(name, "")
        infos = [one for one in infos if one.name in client.models]
    if name:
        asked = served(exchange, name, version)
        infos = [asked] if version else [one for one in infos if one.name == asked.name]
    exchange.metrics.flush()
    metrics = exchange.metrics.models
    return [description.statistics(info, metrics[info.served_as].version) for info in infos]


def repository(exchange: Exchange, *, only_ready: bool) -> list[dict[str, str]]:
    """Every version that is served, or that is to be."""
    models = exchange.models
    not_ready = "" if models.is_ready else models.not_ready or "not ready"
    index = description.repository(models.models(), models.coming, not_ready)
    return [one for one in index if one["state"] == "READY"] if only_ready else index
