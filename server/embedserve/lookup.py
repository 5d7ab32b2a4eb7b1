"""A lookup from its decoded request to its result: plain values and arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from embedserve.model_info import ModelInfo

ResponseChunks = Sequence[bytes | memoryview]
"""An encoded answer in pieces, one after the other; those of a batch's values are not copied."""
EncodedResponse = tuple[ResponseChunks, int]
"""Such pieces, and their bytes."""


def with_size(parts: ResponseChunks) -> EncodedResponse:
    return parts, sum(memoryview(part).nbytes for part in parts)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a caller wants of the answer, where it is not all of it in its codec's plain form.

    Attributes:
        keys: those wanted, in any order; empty: all.
        field: of the request that names them, for messages.
        has_all: the vectors of all keys are wanted whatever ``keys`` are, which are only checked.
        form: what the codec that writes the answer was told; small, as it waits with its request.
    """

    keys: tuple[str, ...] = ()
    field: str = "output_keys"
    has_all: bool = False
    form: object = None


class StringIds(Protocol):
    """The string ids of one request."""

    @property
    def integers(self) -> Mapping[str, np.ndarray | int]:
        """By feature, int64 [n]; the position of the first that is none where one is none."""

    def __getitem__(self, value: int) -> str:
        """The string whose hash is ``value``."""


@dataclass(slots=True)
class LookupRequest:
    """One caller's batch of jagged ids, as a codec understood it.

    Attributes:
        model: "" for the default model.
        features: KJT keys in the caller's order, each once; none: the model's own, in its order.
        ids: int64 [n], the bags one after the other, feature-major; strings as their hashes.
        lengths: int32 [len(features) * batch_size], feature-major.
        weights: float32 [n], or None to count every id once.
        batch_size: examples B, 1 or more.
        string_features: those of ``features`` whose ids were given as strings.
        strings: these strings by their hashes, for messages, and which integers they are, for
            tables that take integers; None where there are none.
        output_dtype: "float32" or "float16", of the values that the caller wants.
        output: None for the whole answer in its plain form, as most callers want it.
    """

    model: str
    features: tuple[str, ...]
    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    batch_size: int
    string_features: frozenset[str] = frozenset()
    strings: StringIds | None = None
    output_dtype: str = "float32"
    output: OutputOptions | None = None

    def response_bytes(self, model: ModelInfo) -> int:
        """Returns the bytes of the values in ``model``'s result; an upper bound if unpooled."""
        return (
            self.batch_size * model.response_bytes_per_example
            + self.ids.size * model.response_bytes_per_id
        )


@dataclass(slots=True)
class LookupResult:
    """The vectors of one request.

    Attributes:
        model: that answered; of an answer with some of its keys, the part that has them.
        values: float32 or float16, as the request wants, C-contiguous, a slice of its batch:
            [B, sum(model.length_per_key)]; of an unpooled model [sum(lengths), dim], one row for
            each id, key after key.
        unknown_ids: how many ids had no row, by feature; None where all had one.
        lengths: int32 [keys, B] of an unpooled model, else None.
        more: the rest of the rows, where a batch was looked up in pieces: ``values`` has the
            first B of them. Never joined before they are written, which would copy all.
        output: of its request.
    """

    model: ModelInfo
    values: np.ndarray
    unknown_ids: Mapping[str, int] | None = None
    lengths: np.ndarray | None = None
    extra_chunks: Sequence[np.ndarray] = ()
    output: OutputOptions | None = None


@dataclass(slots=True)
class Batch:
    """The engine's input for several requests, and what their answers need of it.

    Attributes:
        ids: int64 [n] row numbers, feature-major over the whole batch.
        lengths: int32 [F * B], feature-major, B the examples of all requests in their order.
        weights: float32 [n], or None where no request has any.
        sizes: the examples of each request.
        batch_size: B, their sum.
        ids_per_feature: int64 [F] ids that were asked, those without a row among them; a batch
            that was cut out of another has none.
        unknown_counts: int64 [requests, F] ids that had no row; None where all had one.
        skipped: positions in ``ids`` of those that are answered by zeros, in an unpooled model.
            A pooled model's batch holds them no more.
    """

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    sizes: list[int]
    batch_size: int
    ids_per_feature: np.ndarray = field(init=False)
    unknown_counts: np.ndarray | None = None
    skipped: np.ndarray | None = None
