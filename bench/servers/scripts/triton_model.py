"""Model for Triton's Python backend: pools all requests of a dynamic batch in one kernel call.

bench/servers/triton.py copies it as model.py into the model repository. It reads the parameters of
config.pbtxt, in which {version} stands for the loaded version. A request is one jagged batch of any
length.
"""

from __future__ import annotations

import json
import sys
from typing import Any


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        given = json.loads(args["model_config"])["parameters"]
        parameter = {name: value["string_value"] for name, value in given.items()}
        sys.path.insert(0, parameter["scripts"])
        import torch
        from pooling import Tables

        torch.set_num_threads(1)
        folder = parameter["tables"].replace("{version}", args["model_version"])
        self.features = int(parameter["count"])
        self.tables = Tables(folder, self.features)

    def execute(self, requests: list[Any]) -> list[Any]:
        import triton_python_backend_utils as pb

        def jagged(request: Any) -> tuple[Any, Any]:
            bags = pb.get_input_tensor_by_name(request, "bags").as_numpy()[0]
            end = 1 + self.features * int(bags[0])
            return bags[end:], bags[1:end].reshape(self.features, -1)

        def response(values: Any) -> Any:
            return pb.InferenceResponse([pb.Tensor("values", values[None])])

        return [response(values) for values in self.tables.pool(list(map(jagged, requests)))]
