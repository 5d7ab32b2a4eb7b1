"""Interface of a server whose versions `make swaps` changes, with requests and their exact
responses.

swaps.embedserve_server and swaps.triton_server implement it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

TABLES, DIM, BAG_MAX = 8, 64, 8
FIGURE = 4099
"""Upper bound of a version's values, to which STEP times the version is added. Sums of them are
exact."""
STEP = 5000


def row_values(version: int, table: int, rows: np.ndarray) -> np.ndarray:
    """Returns rows of a version's table, float32 [rows, DIM]."""
    columns = np.arange(DIM)[None, :]
    whole = (rows[:, None] * 7 + columns * 3 + table * 11) % FIGURE + STEP * version
    return whole.astype(np.float32)


@dataclass(frozen=True)
class Codec:
    """Encodes ids of each table as a message, and decodes a response to its version and values
    (float32).

    Attributes:
        headers: HTTP headers of a message; none for gRPC.
    """

    encode: Callable[[Sequence[np.ndarray]], bytes]
    decode: Callable[[bytes], tuple[int, np.ndarray]]
    headers: Callable[[bytes], Mapping[str, str]] = lambda message: {}


@dataclass
class Request:
    """Ids of each table's feature, and the check of responses to them.

    Attributes:
        message: the ids in the codec's format.
        right: correct responses so far, with their versions.
    """

    ids: list[np.ndarray]
    codec: Codec
    message: bytes
    right: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def of(cls, random: Random, rows: int, codec: Codec) -> Request:
        ids = [
            np.array([random.randrange(rows) for _ in range(random.randint(0, BAG_MAX))], np.int64)
            for _ in range(TABLES)
        ]
        return cls(ids, codec, codec.encode(ids))

    def version_of(self, body: bytes) -> int | None:
        """Returns the version of a response; None if the values are not those of that version."""
        if (known := self.right.get(body)) is not None:
            return known
        version, values = self.codec.decode(body)
        expected = [
            row_values(version, table, ids).sum(0, dtype=np.float32)
            for table, ids in enumerate(self.ids)
        ]
        if not np.array_equal(values, np.concatenate(expected)):
            return None
        self.right[body] = version
        return version


@dataclass(frozen=True)
class CallTarget:
    """A target of the steady callers.

    Attributes:
        path: path for REST.
        prefix: bytes before each gRPC message.
        is_followed: whether this target always gets the version that was moved to.
    """

    path: str
    prefix: bytes
    is_followed: bool


class SwapServer(ABC):
    """A server, its versions, and how to call it.

    Attributes:
        targets: targets between which the callers of each protocol alternate; wrk uses the last.
        method: gRPC method.
        ready_path: path that returns 200 once the server is ready.
    """

    rest: Codec
    grpc: Codec
    targets: Sequence[CallTarget]
    method: str
    ready_path: str

    @abstractmethod
    def publish(self, version: int) -> None:
        """Writes the rows of a version, so that it can be moved to."""

    @abstractmethod
    def tables(self, version: int) -> Path:
        """Returns the file with a version's rows."""

    @abstractmethod
    def commands(self, http_port: int, grpc_port: int) -> list[list[str]]:
        """Returns the commands that serve the first version in the foreground until SIGTERM. The
        last one listens on the ports, and is stopped first."""

    @abstractmethod
    async def move(self, version: int) -> None:
        """Switches to a version. May return before the version serves."""

    def move_canary(self, version: int) -> None:
        """Gives the canary's share of the requests to a version, if there is a canary."""
        return

    def environment(self) -> Mapping[str, str]:
        """Returns environment variables to add to the present ones."""
        return {}
