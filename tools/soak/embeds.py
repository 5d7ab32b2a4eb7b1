"""Requests of the soak, with their exact responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import orjson
from running_servers import run_command
from safetensors.numpy import save_file
from server.raw_http import post

from embedserve_proto import embedding_pb2 as pb

MODEL = "m"
ROWS, DIM = 4000, 2048
"""Rows and columns of the table, which exceeds a core's caches."""
TABLE = (
    f"tables: [{{name: t, num_embeddings: {ROWS}, embedding_dim: {DIM}, feature_names: [user], "
    "pooling: sum}]"
)
FIGURE = 4099
"""Upper bound of the values, so that sums of thousands of them are exact in float32."""
LIGHT, LARGE = (1, 2), (4, 2000)
"""(examples, ids of each). A large request has 16 kB and takes milliseconds to look up, so that
sending costs much less than answering."""
LIGHT_COUNT, LARGE_COUNT = 64, 16
REFUSED = "RESOURCE_EXHAUSTED"
REFUSAL_BYTES_MAX = 1000


def table() -> np.ndarray:
    """Returns the table, float32 [ROWS, DIM], whole numbers."""
    rows, columns = np.arange(ROWS)[:, None], np.arange(DIM)[None, :]
    return ((rows * 7 + columns * 3) % FIGURE).astype(np.float32)


def publish(folder: Path) -> Path:
    """Publishes the table, and returns its store."""
    save_file({"embedding_bags.t.weight": table()}, folder / "model.safetensors")
    (folder / "tables.yaml").write_text(TABLE)
    names = (folder / "model.safetensors", folder / "tables.yaml", folder / "store")
    done = run_command("publish", *names, "--model", MODEL)
    assert done.returncode == 0, done.stderr
    return folder / "store"


@dataclass
class EmbedCase:
    """A request in all formats, and the check of its responses.

    Attributes:
        json, protobuf: HTTP/1 requests with their headers.
        message: gRPC message.
        values: expected values, float32 [examples, DIM].
    """

    json: bytes
    protobuf: bytes
    message: bytes
    values: np.ndarray
    _right: set[bytes] = field(default_factory=set)

    def is_answer(self, body: bytes) -> bool:
        """Returns whether ``body``, JSON or a message, has the expected values. Correct bodies are
        cached."""
        if body in self._right:
            return True
        try:
            values = _values(body)
        except (ValueError, KeyError, TypeError):
            return False
        is_right = values.shape == self.values.shape and bool((values == self.values).all())
        if is_right and len(self._right) < 4:
            self._right.add(body)
        return is_right


def _values(body: bytes) -> np.ndarray:
    if body.startswith(b"{"):
        return np.array(orjson.loads(body)["values"], np.float32)
    answer = pb.EmbedResponse.FromString(body)
    return np.frombuffer(answer.values, "<f4").reshape(answer.batch_size, -1)


def is_refusal(body: bytes) -> bool:
    """Returns whether a message of a stream is a rejection."""
    if len(body) > REFUSAL_BYTES_MAX:
        return False
    answer = pb.EmbedResponse.FromString(body)
    return answer.error.code == REFUSED


def asks(
    random: Random, rows: np.ndarray, size: tuple[int, int], count: int
) -> Sequence[EmbedCase]:
    """Returns ``count`` different requests of a size."""
    return [_ask(random, rows, *size) for _ in range(count)]


def _ask(random: Random, rows: np.ndarray, examples: int, bag: int) -> EmbedCase:
    ids = [[random.randrange(ROWS) for _ in range(bag)] for _ in range(examples)]
    message = pb.EmbedRequest(
        keys=["user"], ids=[one for row in ids for one in row], lengths=[bag] * examples
    ).SerializeToString()
    return EmbedCase(
        json=post(orjson.dumps({"features": {"user": ids}})),
        protobuf=post(message, "Content-Type: application/x-protobuf"),
        message=message,
        values=np.stack([rows[row].sum(0) for row in ids]),
    )
