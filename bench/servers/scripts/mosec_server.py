"""mosec server: one worker, which pools a batch in one lookup.

mosec_server.py TABLES_FOLDER TABLES --port PORT …
"""

from __future__ import annotations

import os
import sys
from typing import Any

import orjson
import torch
from mosec import Server, Worker
from pooling import Tables, from_bags

BATCH_MAX = 64
WAIT_MS_MAX = 1


class Pooling(Worker):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        count = int(os.environ["TABLES"])
        self.names = [f"f{i}" for i in range(count)]
        self.tables = Tables(os.environ["FOLDER"], count)

    def deserialize(self, data: bytes) -> Any:
        return from_bags(orjson.loads(data), self.names)

    def serialize(self, data: Any) -> bytes:
        return orjson.dumps({"values": data}, option=orjson.OPT_SERIALIZE_NUMPY)

    def forward(self, data: Any) -> Any:
        return self.tables.pool(data)


if __name__ == "__main__":
    os.environ["FOLDER"], os.environ["TABLES"] = sys.argv[1:3]
    del sys.argv[1:3]
    server = Server()
    server.append_worker(Pooling, num=1, max_batch_size=BATCH_MAX, max_wait_time=WAIT_MS_MAX)
    server.run()
