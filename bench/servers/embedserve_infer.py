"""embedserve over the Open Inference Protocol, with the bodies that tritonclient sends."""

from __future__ import annotations

import numpy as np
from workloads import Request, Workload

from servers.base import Way
from servers.embedserve import EmbedServe
from servers.open_inference import Tensor, infer_body, infer_headers, infer_values, infer_ways

OUTPUT = "pooled"
"""Output with the values of all features in one tensor, as Triton's model returns them."""


class EmbedServeInfer(EmbedServe):
    """embedserve with the ids and lengths of each feature as tensors."""

    name = "embedserve, Open Inference"

    def prepare(self, workload: Workload, port: int) -> None:
        self.ways = infer_ways(workload.tables.name)

    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        return infer_body(way, workload.tables.name, tensors_of(workload, request), OUTPUT)

    def headers(self, way: Way, body: bytes) -> dict[str, str]:
        return infer_headers(way, body)

    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        return infer_values(way, answer)


def tensors_of(work: Workload, request: Request) -> list[Tensor]:
    """Returns the tensors F.ids and F.lengths of each feature F."""
    tensors = []
    for feature, (ids, lengths) in zip(work.tables.features, request.per_feature(), strict=True):
        tensors.append(Tensor(f"{feature}.ids", ids.astype("<i8")))
        tensors.append(Tensor(f"{feature}.lengths", lengths.astype("<i4")))
    return tensors
