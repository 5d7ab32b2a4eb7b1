"""LitServe server: one worker, which pools a batch in one lookup.

litserve_server.py TABLES_FOLDER TABLES PORT
"""

from __future__ import annotations

import sys
from typing import Any, no_type_check

import litserve
import orjson
import torch
from fastapi import Response
from pooling import Tables, from_bags

BATCH_MAX = 64
WAIT_S_MAX = 0.001


class Pooling(litserve.LitAPI):
    folder = ""
    count = 0

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.names = [f"f{i}" for i in range(self.count)]
        self.tables = Tables(self.folder, self.count)

    # LitServe interprets type hints of this method and of encode_response.
    @no_type_check
    def decode_request(self, request):  # noqa: ANN201
        return from_bags(request, self.names)

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, inputs: list[Any]) -> list[Any]:
        return self.tables.pool(inputs)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    @no_type_check
    def encode_response(self, output):  # noqa: ANN201
        body = orjson.dumps({"values": output}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, media_type="application/json")


if __name__ == "__main__":
    api = Pooling(max_batch_size=BATCH_MAX, batch_timeout=WAIT_S_MAX)
    api.folder, api.count = sys.argv[1], int(sys.argv[2])
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, track_requests=False)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[3]),
        num_api_servers=1,
        log_level="error",
        generate_client_file=False,
        access_log=False,
    )
