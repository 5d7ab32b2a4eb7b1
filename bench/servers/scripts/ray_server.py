"""Ray Serve server: one replica, which pools a batch in one lookup.

ray_server.py TABLES_FOLDER TABLES PORT
"""

import signal
import sys
from typing import Any

import orjson
import ray
from pooling import Tables, from_bags
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

BATCH_MAX = 64
WAIT_S_MAX = 0.001


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
class Pooling:
    def __init__(self, folder: str, count: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.names = [f"f{i}" for i in range(count)]
        self.tables = Tables(folder, count)

    @serve.batch(max_batch_size=BATCH_MAX, batch_wait_timeout_s=WAIT_S_MAX)
    async def pool(self, requests: list[Any]) -> list[Any]:
        return self.tables.pool(requests)

    async def __call__(self, request: Request) -> Response:
        features = orjson.loads(await request.body())
        values = await self.pool(from_bags(features, self.names))
        body = orjson.dumps({"values": values}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, media_type="application/json")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder, count, port = sys.argv[1:]
    path = {"env_vars": {"PYTHONPATH": sys.path[0]}}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=path)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    try:
        application = Pooling.bind(folder, int(count))  # type: ignore[attr-defined]
        serve.run(application, route_prefix="/embed")
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()
