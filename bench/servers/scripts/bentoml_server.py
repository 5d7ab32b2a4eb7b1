"""BentoML server: one worker, whose method pools a batch in one lookup.

The environment variables FOLDER and TABLES give the folder and the number of tables.
"""

import os

import bentoml
import torch
from pooling import Tables, from_bags

BATCH_MAX = 64
LATENCY_MS_MAX = 1000


@bentoml.service(workers=1, traffic={"timeout": 30, "concurrency": 256})
class Pooling:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        count = int(os.environ["TABLES"])
        self.names = [f"f{i}" for i in range(count)]
        self.tables = Tables(os.environ["FOLDER"], count)

    @bentoml.api(
        route="/embed", batchable=True, max_batch_size=BATCH_MAX, max_latency_ms=LATENCY_MS_MAX
    )
    def embed(
        self, features: list[dict[str, list[list[int]]]]
    ) -> list[dict[str, list[list[float]]]]:
        pooled = self.tables.pool([from_bags(one, self.names) for one in features])
        return [{"values": values.tolist()} for values in pooled]
