"""Model for Triton's Python backend that adds up rows; of_triton.py serves it."""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, DIM = 500, 8


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.rows = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        import triton_python_backend_utils as pb

        ids, lengths = (
            pb.get_input_tensor_by_name(request, f"user.{part}").as_numpy()
            for part in ("ids", "lengths")
        )
        if lengths.sum() != ids.size:
            said = f"user.lengths adds up to {lengths.sum()}, but user.ids has {ids.size}"
            return pb.InferenceResponse([], pb.TritonError(said, pb.TritonError.INVALID_ARG))
        values = np.zeros((lengths.size, DIM), np.float32)
        np.add.at(values, np.repeat(np.arange(lengths.size), lengths), self.rows[ids])
        wanted = request.requested_output_names()
        return pb.InferenceResponse([pb.Tensor(name, values) for name in wanted])
