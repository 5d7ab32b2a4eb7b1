"""Lookups with their expected responses, which numpy computes outside of the server.

The tables hold whole numbers, so that float32 sums are equal in any order. Tests compare every
response as a whole: model, version, keys, widths and each value.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from embedserve_proto import embedding_pb2 as pb

MODEL = "shop"
SHARED_MEMORY = "/embedserve-interop-"
"""Prefix of the keys of shared-memory regions."""
SERVICE = "embedserve.v1.EmbeddingService"
ROWS = {"user": 500, "movie": 300}
DIMS = {"user": 8, "movie": 64}
WIDTH = sum(DIMS.values())

_rng = np.random.default_rng(0)
TABLES = {
    feature: _rng.integers(-100, 101, (rows, DIMS[feature])).astype(np.float32)
    for feature, rows in ROWS.items()
}


@dataclass(frozen=True)
class Lookup:
    """A request of both features.

    Attributes:
        bags: by feature, the ids of each example.
        is_raw: whether ids and lengths are sent as bytes instead of packed fields.
    """

    bags: dict[str, list[list[int]]]
    is_raw: bool = False

    @cached_property
    def request(self) -> pb.EmbedRequest:
        bags = [bag for feature in self.bags for bag in self.bags[feature]]
        ids, lengths = [one for bag in bags for one in bag], [len(bag) for bag in bags]
        request = pb.EmbedRequest(model=MODEL, keys=list(self.bags))
        if self.is_raw:
            request.ids_bytes = np.array(ids, "<i8").tobytes()
            request.lengths_bytes = np.array(lengths, "<i4").tobytes()
        else:
            request.ids.extend(ids)
            request.lengths.extend(lengths)
        return request

    @cached_property
    def body(self) -> bytes:
        return self.request.SerializeToString()

    @cached_property
    def framed(self) -> bytes:
        """Returns the request in gRPC's framing: flag (not compressed), length, message."""
        return b"\0" + len(self.body).to_bytes(4, "big") + self.body

    @cached_property
    def json_body(self) -> bytes:
        return json.dumps({"features": self.bags}).encode()

    @cached_property
    def values(self) -> np.ndarray:
        """Returns float32 [B, WIDTH]."""
        return np.concatenate([_pooled(feature, self.bags[feature]) for feature in ROWS], axis=1)

    @property
    def by_feature(self) -> dict[str, np.ndarray]:
        """Returns float32 [B, dim] of each feature."""
        starts = accumulate(DIMS.values(), initial=0)
        return {
            name: self.values[:, start : start + dim]
            for (name, dim), start in zip(DIMS.items(), starts, strict=False)
        }

    @cached_property
    def response(self) -> pb.EmbedResponse:
        return pb.EmbedResponse(
            model=MODEL,
            version=1,
            keys=list(ROWS),
            length_per_key=list(DIMS.values()),
            batch_size=len(self.values),
            values=self.values.tobytes(),
        )

    @cached_property
    def json_response(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "version": 1,
            "keys": list(ROWS),
            "length_per_key": list(DIMS.values()),
            "values": self.values.tolist(),
        }


def _pooled(feature: str, bags: list[list[int]]) -> np.ndarray:
    """Returns float32 [B, dim]: the rows, multiplied by their number of occurrences in each bag."""
    rows = ROWS[feature]
    cells = [rows * example + one for example, bag in enumerate(bags) for one in bag]
    counts = np.bincount(np.array(cells, np.int64), minlength=rows * len(bags))
    return counts.reshape(len(bags), rows).astype(np.float32) @ TABLES[feature]


def lookup(seed: int, examples: int = 3, ids_max: int = 8, is_raw: bool = False) -> Lookup:
    """Returns jagged ids, some bags empty, which depend on the seed."""
    rng = np.random.default_rng(seed)
    bags = {
        feature: [
            rng.integers(0, rows, rng.integers(0, ids_max + 1)).tolist() for _ in range(examples)
        ]
        for feature, rows in ROWS.items()
    }
    return Lookup(bags, is_raw)


def lookups(count: int, first_seed: int = 0) -> list[Lookup]:
    """Returns lookups of one to seven examples each."""
    return [lookup(seed, 1 + seed % 7) for seed in range(first_seed, first_seed + count)]


@cache
def large_response() -> Lookup:
    """Returns a lookup whose response has 5.8 MB and whose request has 0.8 MB."""
    return lookup(1, 20_000, 4, is_raw=True)


@cache
def large_request() -> Lookup:
    """Returns a lookup whose response has 0.1 MB and whose request has 3.2 MB.

    The request exceeds the flow-control windows of a stream and of a connection.
    """
    return lookup(2, 500, 800, is_raw=True)


INVALID = Lookup({"user": [[7], [ROWS["user"]]], "movie": [[], []]})
"""A lookup whose second example has an id past the table's end."""
INVALID_FIELD = "features.user[1][0]"


def assert_responses(bodies: Sequence[bytes], requested: Sequence[Lookup]) -> None:
    """Checks that each body is the response to its lookup. A failure shows only its start."""
    assert len(bodies) == len(requested)
    for number, (body, one) in enumerate(zip(bodies, requested, strict=True)):
        is_right = pb.EmbedResponse.FromString(body) == one.response
        assert is_right, f"response {number} of {len(requested)} is wrong: {body[:80]!r}"


def assert_outputs(outputs: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    """Checks that the outputs are (shape, base64 of float32) as expected, and that there are no
    others.
    """
    assert set(outputs) == set(expected)
    for name, values in expected.items():
        shape, encoded = outputs[name]
        assert tuple(shape) == values.shape
        assert base64.b64decode(encoded) == np.ascontiguousarray(values).tobytes()
