"""Shards with constant replies to Embed: a gRPC server in a process."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from running_servers import free_port

from embedserve_proto.embedding_pb2 import ListModelsResponse, Model

MODELS = ListModelsResponse(
    models=[Model(model="dlrm", version=7, fingerprint="f7", part=1, parts=4)]
)
START_S_MAX = 300
SHARD = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc

MODELS = bytes.fromhex(sys.argv[3])

def embed(message, context):
    if message == b"fail":
        context.set_trailing_metadata((("retry-after", "7"),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full: %")
    if message == b"sleep":
        time.sleep(600)
    if message == b"left":
        return b"%f" % context.time_remaining()
    if message == b"metadata":
        return repr(sorted(context.invocation_metadata())).encode()
    return message * int(sys.argv[2])

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        if details.method == "/embedserve.v1.EmbeddingService/ListModels":
            return grpc.unary_unary_rpc_method_handler(lambda message, context: MODELS)
        if details.method == "/embedserve.v1.EmbeddingService/Embed":
            return grpc.unary_unary_rpc_method_handler(embed)

options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
server = grpc.server(ThreadPoolExecutor(8), (Handler(),), options=options)
port = server.add_insecure_port("127.0.0.1:" + sys.argv[1])
server.start()
print(port, flush=True)
server.wait_for_termination()
"""


@dataclass
class GrpcShard:
    """A running shard process, and its port."""

    process: asyncio.subprocess.Process
    port: int

    def stop(self) -> None:
        """Stops the process, and returns once all threads have stopped.

        The signal reaches one thread, which stops the others.
        """
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)


@asynccontextmanager
async def grpc_shard(repeats: int = 1, port: int | None = None) -> AsyncIterator[GrpcShard]:
    """Runs a shard that repeats the request message ``repeats`` times; kills it at the end."""
    port = port or free_port()  # stays reserved after a kill
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", SHARD, str(port), str(repeats), MODELS.SerializeToString().hex()),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S_MAX)
        yield GrpcShard(process, int(line))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
