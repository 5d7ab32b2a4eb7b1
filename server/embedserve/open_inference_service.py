"""What is served, as the Open Inference Protocol asks for it: by a model's name and its version.

Between the pipeline and the frontends of REST and gRPC, which tell the same.
"""

from __future__ import annotations

from typing import Any

from embedserve.access.authenticator import CallerQuota
from embedserve.codec.open_inference import description
from embedserve.codec.open_inference.answers import versioned
from embedserve.model_info import ModelInfo
from embedserve.pipeline import RequestPipeline


def server_metadata(pipeline: RequestPipeline) -> dict[str, Any]:
    return description.server(has_shared_memory=pipeline.shared_memory is not None)


def served(pipeline: RequestPipeline, name: str, version: str = "") -> ModelInfo:
    """Raises UnknownModelError if it is not."""
    return pipeline.models.model(versioned(name, version))


def metadata(pipeline: RequestPipeline, name: str, version: str = "") -> dict[str, Any]:
    """The tensors of a model, and all its versions. Raises UnknownModelError."""
    info = served(pipeline, name, version)
    versions = {one.version for one in pipeline.models.models() if one.name == info.name}
    return description.model(info, [info.version] if version else sorted(versions))


def configuration(pipeline: RequestPipeline, name: str, version: str = "") -> dict[str, Any]:
    """As metadata, in the form of Triton's extension. Raises UnknownModelError."""
    return description.configuration(served(pipeline, name, version))


def statistics(
    pipeline: RequestPipeline, name: str = "", version: str = "", quota: CallerQuota | None = None
) -> list[dict[str, Any]]:
    """Returns the statistics of one version, of all versions of a model, or of all models where
    ``name`` is empty: of those that ``client`` may ask, and of all for administrators.

    Raises:
        UnknownModelError: there is no such model.
        PermissionDeniedError: ``client`` may not ask it.
    """
    infos = pipeline.models.models()
    if quota is not None and quota.models is not None and "admin" not in quota.grant.roles:
        if name:
            quota.check_model(name, "")
        infos = [one for one in infos if one.name in quota.models]
    if name:
        asked = served(pipeline, name, version)
        infos = [asked] if version else [one for one in infos if one.name == asked.name]
    pipeline.metrics.flush()
    metrics = pipeline.metrics.models
    return [description.statistics(info, metrics[info.served_as].version) for info in infos]


def repository(pipeline: RequestPipeline, *, only_ready: bool) -> list[dict[str, str]]:
    """Every version that is served, or that is to be."""
    models = pipeline.models
    not_ready = "" if models.is_ready else models.not_ready or "not ready"
    index = description.repository(models.models(), models.coming, not_ready)
    return [one for one in index if one["state"] == "READY"] if only_ready else index
