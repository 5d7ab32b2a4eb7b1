"""Descriptions of the server and its models in the Open Inference Protocol, for REST and gRPC.

Descriptions are JSON values with the names of the protocol's message fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from embedserve import __version__
from embedserve.codec.open_inference.outputs import DATATYPES, POOLED
from embedserve.metrics.histogram import Histogram
from embedserve.metrics.request_metrics import NO_FAILURES, VersionMetrics
from embedserve.model_info import ModelInfo, PendingVersion
from embedserve.model_names import split_name

PLATFORM = "torchrec"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
SHARED_MEMORY = "system_shared_memory"
"""Extension that is listed only by servers with shared memory."""
_NS_PER_S = 1_000_000_000
_ANY = -1


def server(*, has_shared_memory: bool) -> dict[str, Any]:
    extensions = [*EXTENSIONS, SHARED_MEMORY] if has_shared_memory else [*EXTENSIONS]
    return {"name": "embedserve", "version": __version__, "extensions": extensions}


def model(info: ModelInfo, versions: Iterable[int]) -> dict[str, Any]:
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
    outputs = [_tensor(name, DATATYPES[4], _ANY, width) for name, width in widths.items()]
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
    metadata = model(info, [])
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


def statistics(info: ModelInfo, metrics: VersionMetrics) -> dict[str, Any]:
    """Returns the statistics of ``info`` since it began to serve, summed over all workers.

    A request succeeds or fails only after it was handed to the version. Requests rejected earlier,
    such as for an unknown model, count as neither, nor do requests whose client disconnected.

    Queue and compute counts are updated when a batch is taken. All counts are in requests, as in
    Triton, and as perf_analyzer expects.
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


def repository(
    models: Iterable[ModelInfo], coming: Mapping[str, PendingVersion], not_ready: str
) -> list[dict[str, str]]:
    """Returns the index of all versions that are served or pending.

    Args:
        coming: pending versions, by name in the format of --model.
        not_ready: reason why the server is not ready; "" while it is ready.
    """
    index = []
    for info in models:
        state = "UNAVAILABLE" if not_ready else "READY"
        index.append(_indexed(info.name, info.version, state, not_ready))
    for name, one in coming.items():
        state = "UNAVAILABLE" if one.state == "failed" else "LOADING"
        index.append(_indexed(split_name(name)[0], one.version, state, one.reason))
    return index


def _indexed(name: str, version: int, state: str, reason: str) -> dict[str, str]:
    return {"name": name, "version": str(version), "state": state, "reason": reason}
