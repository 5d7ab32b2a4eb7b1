"""What `make swaps` asks of a server whose versions take turns, and what a right answer is.

The servers themselves are swaps.embedserve_server and swaps.triton_server.
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
"""Values of a version are below, and added to its number of STEPs: sums of them are exact."""
STEP = 5000


def row_values(version: int, table: int, rows: np.ndarray) -> np.ndarray:
    """float32 [rows, DIM]: the rows of a table of a version."""
    columns = np.arange(DIM)[None, :]
    whole = (rows[:, None] * 7 + columns * 3 + table * 11) % FIGURE + STEP * version
    return whole.astype(np.float32)


@dataclass(frozen=True)
class Codec:
    """How ids of each table become a message, and an answer its version and values (float32).

    Attributes:
        headers: of the POST of a message; none over gRPC.
    """

    encode: Callable[[Sequence[np.ndarray]], bytes]
    decode: Callable[[bytes], tuple[int, np.ndarray]]
    headers: Callable[[bytes], Mapping[str, str]] = lambda message: {}


@dataclass
class Request:
    """Ids of each table's feature, and what answers it exactly.

    Attributes:
        message: in the codec's form.
        right: answers that were compared, with their versions.
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
        """Of an answer; None if it is not right for the version that it names."""
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
    """One way in which steady callers ask.

    Attributes:
        path: that REST posts to.
        prefix: before each message of gRPC.
        is_followed: whether the version that was moved to is the one that answers.
    """

    path: str
    prefix: bytes
    is_followed: bool


class SwapServer(ABC):
    """A server, its versions, and how to ask it.

    Attributes:
        targets: that callers of each protocol take turns with; the last one is wrk's, too.
        method: of gRPC.
        ready_path: answers with 200 once the server does.
    """

    rest: Codec
    grpc: Codec
    targets: Sequence[CallTarget]
    method: str
    ready_path: str

    @abstractmethod
    def publish(self, version: int) -> None:
        """Makes a version's rows, so that it can be moved to."""

    @abstractmethod
    def tables(self, version: int) -> Path:
        """The file of a version's rows."""

    @abstractmethod
    def command(self, http_port: int, grpc_port: int) -> list[str]:
        """Serves the first version in the foreground until SIGTERM."""

    @abstractmethod
    async def move(self, version: int) -> None:
        """Has a version answer from now on. May return before, or once, it does."""

    def move_canary(self, version: int) -> None:
        """Has a version answer the canary's share of the requests, where there is one."""
        return

    def environment(self) -> Mapping[str, str]:
        """Variables beside the present ones."""
        return {}
