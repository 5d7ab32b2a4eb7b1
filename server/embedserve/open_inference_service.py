"""Metadata, configuration and statistics of the served models for the Open Inference Protocol.

This module is between the pipeline and the frontends of REST and gRPC, which return the same data.
"""

from __future__ import annotations

from typing import Any

from embedserve.access.caller_quota import CallerQuota
from embedserve.codec.open_inference import description
from embedserve.codec.open_inference.outputs import versioned
from embedserve.model_info import ModelInfo
from embedserve.pipeline import RequestPipeline


def server_metadata(pipeline: RequestPipeline) -> dict[str, Any]:
    pipeline.models.check_loaded()
    return description.server(has_shared_memory=pipeline.shared_memory is not None)


def served(pipeline: RequestPipeline, name: str, version: str = "") -> ModelInfo:
    """Returns the served version. Raises UnknownModelError if it is not served."""
    return pipeline.models.model(versioned(name, version))


def metadata(pipeline: RequestPipeline, name: str, version: str = "") -> dict[str, Any]:
    """Returns the tensors of a model and its served versions. Raises UnknownModelError.

    The versions are only the named version if the request names one.
    """
    info = served(pipeline, name, version)
    return description.model(info, [info.version] if version else served_versions(pipeline, info))


def served_versions(pipeline: RequestPipeline, info: ModelInfo) -> list[int]:
    """Returns the served versions of the model of ``info``, in ascending order."""
    return sorted({one.version for one in pipeline.models.models() if one.name == info.name})


def configuration(pipeline: RequestPipeline, name: str, version: str = "") -> dict[str, Any]:
    """Returns the model's configuration in the format of Triton's extension. Raises
    UnknownModelError."""
    return description.configuration(served(pipeline, name, version))


def statistics(
    pipeline: RequestPipeline, name: str = "", version: str = "", quota: CallerQuota | None = None
) -> list[dict[str, Any]]:
    """Returns the statistics of one version, of all versions of a model, or of all models if
    ``name`` is empty.

    They cover the models that the caller may request; administrators get all models.

    Args:
        quota: authenticated caller; None without authentication.

    Raises:
        UnknownModelError: the model or version is not served.
        PermissionDeniedError: the caller may not request the model.
    """
    pipeline.models.check_loaded()
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
    """Returns the index of all versions that are served or pending; ``only_ready`` leaves out
    versions that are not ready."""
    models = pipeline.models
    models.check_loaded()
    not_ready = "" if models.is_ready else models.not_ready or "not ready"
    index = description.repository(models.models(), models.pending_versions, not_ready)
    return [one for one in index if one["state"] == "READY"] if only_ready else index
