"""Metadata, configuration and statistics of the served models for the Open Inference Protocol.

This module is between the pipeline and the frontends of REST and gRPC, which return the same data:
JSON values with the names of the protocol's message fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from embedserve import __version__
from embedserve.access.caller_quota import CallerQuota
from embedserve.codec.open_inference.outputs import OUTPUT_DATATYPES, POOLED, versioned
from embedserve.metrics.histogram import Histogram
from embedserve.metrics.request_metrics import NO_FAILURES, VersionMetrics
from embedserve.model_info import ModelInfo
from embedserve.model_names import split_name
from embedserve.pipeline import RequestPipeline

PLATFORM = "torchrec"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
SHARED_MEMORY = "system_shared_memory"
"""Extension that is listed only by servers with shared memory."""
_NS_PER_S = 1_000_000_000
_ANY = -1


def server_metadata(pipeline: RequestPipeline) -> dict[str, Any]:
    pipeline.models.check_loaded()
    extensions = list(EXTENSIONS)
    if pipeline.shared_memory is not None:
        extensions.append(SHARED_MEMORY)
    return {"name": "embedserve", "version": __version__, "extensions": extensions}


def served(pipeline: RequestPipeline, name: str, version: str = "") -> ModelInfo:
    """Returns the served version. Raises UnknownModelError if it is not served."""
    return pipeline.models.model(versioned(name, version))


def metadata(pipeline: RequestPipeline, name: str, version: str = "") -> dict[str, Any]:
    """Returns the tensors of a model and its served versions. Raises UnknownModelError.

    The versions are only the named version if the request names one.
    """
    info = served(pipeline, name, version)
    return model_metadata(info, [info.version] if version else served_versions(pipeline, info))


def served_versions(pipeline: RequestPipeline, info: ModelInfo) -> list[int]:
    """Returns the served versions of the model of ``info``, in ascending order."""
    return sorted({one.version for one in pipeline.models.models() if one.name == info.name})


def model_metadata(info: ModelInfo, versions: Iterable[int]) -> dict[str, Any]:
    """Returns the metadata of ``info``: its inputs and outputs, and the ``versions`` of its model.

    For a feature F the inputs F.ids and F.lengths are listed. F alone and F.weights are accepted,
    too.
    """
    inputs = []
    for feature in info.features:
        datatype = "BYTES" if feature in info.string_features else "INT64"
        inputs.append(_tensor(f"{feature}.ids", datatype, _ANY))
        inputs.append(_tensor(f"{feature}.lengths", "INT32", _ANY))
    widths = dict(zip(info.keys, info.length_per_key, strict=True))
    if info.is_pooled:
        widths[POOLED] = sum(info.length_per_key)
    outputs = [_tensor(name, OUTPUT_DATATYPES[4], _ANY, width) for name, width in widths.items()]
    return {
        "name": info.name,
        "versions": [str(version) for version in versions],
        "platform": PLATFORM,
        "inputs": inputs,
        "outputs": outputs,
    }


def configuration(info: ModelInfo) -> dict[str, Any]:
    """Returns the tensors of ``info`` in the format of Triton's model configuration, which load
    generators request.

    Each shape includes the batch dimension, so max_batch_size is 0. Every input is optional.
    """
    metadata = model_metadata(info, [])
    return {
        "name": metadata["name"],
        "platform": metadata["platform"],
        "max_batch_size": 0,
        "input": [{**_configured(one), "optional": True} for one in metadata["inputs"]],
        "output": [_configured(one) for one in metadata["outputs"]],
    }


def _configured(tensor: Mapping[str, Any]) -> dict[str, Any]:
    datatype = "STRING" if tensor["datatype"] == "BYTES" else tensor["datatype"]
    return {"name": tensor["name"], "data_type": f"TYPE_{datatype}", "dims": tensor["shape"]}


def _tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


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
        info = served(pipeline, name, version)
        infos = [info] if version else [one for one in infos if one.name == info.name]
    pipeline.metrics.flush()
    metrics = pipeline.metrics.models
    return [_statistics_of(info, metrics[info.served_as].version) for info in infos]


def _statistics_of(info: ModelInfo, metrics: VersionMetrics) -> dict[str, Any]:
    """Returns the statistics of ``info`` since it began to serve, summed over all workers.

    A request succeeds or fails only after it was handed to the version. Requests rejected earlier,
    such as for an unknown model, count as neither, nor do requests whose client disconnected.

    Queue and compute counts are updated when a batch is taken. All counts of "inference_stats" are
    in requests, as in Triton, and as perf_analyzer expects.
    """
    outcomes = metrics.requests.total()
    failures = sum(count for outcome, count in outcomes.items() if outcome not in NO_FAILURES)
    answered_s, failed_s = metrics.requests.total_seconds()
    waits, waited_ns = _total(metrics.wait_seconds)
    batches, looked_up_ns = _total(metrics.lookup_seconds)
    _, examples = metrics.batch_examples.samples()
    unmeasured = {"count": waits, "ns": 0}
    return {
        "name": info.name,
        "version": str(info.version),
        "last_inference": 0,
        "inference_count": int(examples),
        "execution_count": batches,
        "inference_stats": {
            "success": {"count": int(outcomes["OK"]), "ns": int(answered_s * _NS_PER_S)},
            "fail": {"count": int(failures), "ns": int(failed_s * _NS_PER_S)},
            "queue": {"count": waits, "ns": waited_ns},
            "compute_input": unmeasured,
            "compute_infer": {"count": waits, "ns": looked_up_ns},
            "compute_output": unmeasured,
        },
    }


def _total(seconds: Histogram) -> tuple[int, int]:
    """Returns (number of observations, their total in nanoseconds)."""
    counts, total_s = seconds.samples()
    return int(counts[-1][1]), int(total_s * _NS_PER_S)


def repository(pipeline: RequestPipeline, *, only_ready: bool) -> list[dict[str, str]]:
    """Returns the index of all versions that are served or pending; ``only_ready`` leaves out
    versions that are not ready."""
    models = pipeline.models
    models.check_loaded()
    not_ready = "" if models.is_ready else models.not_ready or "not ready"
    state = "UNAVAILABLE" if not_ready else "READY"
    index = [_indexed(one.name, one.version, state, not_ready) for one in models.models()]
    for name, pending in models.pending_versions.items():
        state = "UNAVAILABLE" if pending.state == "failed" else "LOADING"
        index.append(_indexed(split_name(name)[0], pending.version, state, pending.reason))
    return [one for one in index if one["state"] == "READY"] if only_ready else index


def _indexed(name: str, version: int, state: str, reason: str) -> dict[str, str]:
    return {"name": name, "version": str(version), "state": state, "reason": reason}
