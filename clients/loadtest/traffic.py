"""Requests of a load test: mixed sizes and Zipf-distributed ids, for any served model.

Uses the server's `ModelInfo` and the settings of the test. Returns requests as features, and as the
bytes or messages to send. Equal seeds give equal requests. Works without locust, which replaces the
standard library's sockets and threads.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_client import ModelInfo, ModelList
from embedserve_client.core.batch import batch_of
from embedserve_client.core.messages import request_of
from embedserve_proto import embedding_pb2 as pb
from ids import FeatureIds, ids_by_feature


@dataclass(frozen=True)
class Settings:
    """Settings of a load test that the user chooses.

    Attributes:
        sizes: pairs of (examples of a request, relative frequency of such requests).
        ids_max: ids of a bag, at most. Bag sizes are uniform from 0 to ids_max.
        zipf: exponent of the distribution of ids; 0 is uniform.
        seed: random seed of the whole test.
    """

    sizes: tuple[tuple[int, float], ...]
    ids_max: int
    zipf: float
    seed: int

    def __post_init__(self) -> None:
        if self.ids_max < 1:
            raise ValueError(f"--ids-max: {self.ids_max} is less than 1")
        if not 0 <= self.zipf <= 10:
            raise ValueError(f"--zipf: {self.zipf} is not within 0 and 10")
        if self.seed < 0:
            raise ValueError(f"--seed: {self.seed} is negative")


def parse_sizes(option: str) -> tuple[tuple[int, float], ...]:
    """Parses "1:90,50:9,500:1" into examples and weights. Raises ValueError for the first wrong
    part."""
    sizes = []
    for part in option.split(","):
        try:
            examples, weight = part.split(":")
            sizes.append((int(examples), float(weight)))
        except ValueError:
            raise ValueError(f"--sizes: {part!r} is not EXAMPLES:WEIGHT") from None
        if sizes[-1][0] < 1 or not 0 < sizes[-1][1] < float("inf"):
            raise ValueError(f"--sizes: {part!r} has no positive examples and weight")
    return tuple(sizes)


@dataclass(frozen=True)
class Request:
    """One request. Its features are pairs (ids, lengths int32 [examples])."""

    model: str
    examples: int
    features: Mapping[str, tuple[NDArray[Any], NDArray[np.int32]]]

    def message(self) -> pb.EmbedRequest:
        """Returns the message for gRPC, or for REST once serialized."""
        return request_of(batch_of(self.features), self.model)

    def json(self) -> bytes:
        """Returns the body of POST /models/{model}/embed."""
        bags = {feature: _bags(*pair) for feature, pair in self.features.items()}
        return json.dumps({"features": bags}).encode()


class Traffic:
    """Source of requests to one model.

    Attributes:
        skipped: features that no request uses, because none of their ids is known.
        guessed: features whose ids may be unknown to their table.
    """

    def __init__(
        self, model: ModelInfo, settings: Settings, vocabularies: Mapping[str, Sequence[str]]
    ) -> None:
        self.model = model.model
        self._settings = settings
        self._ids = ids_by_feature(model, vocabularies)
        if not self._ids:
            raise ValueError(
                f"--vocabularies: none is given, and {model.model!r} refuses ids unknown to it"
            )
        self.skipped = tuple(one for one in model.features if one not in self._ids)
        self.guessed = tuple(one for one, ids in self._ids.items() if not ids.is_known)
        weights = np.array([weight for _, weight in settings.sizes])
        self._examples = [examples for examples, _ in settings.sizes]
        self._cumulated = np.cumsum(weights / weights.sum())

    def random(self, user: int) -> np.random.Generator:
        """Returns the random generator of one user; each user number has its own sequence."""
        return np.random.default_rng((self._settings.seed, user))

    def request(self, random: np.random.Generator) -> Request:
        """Returns the next request of a user."""
        at = int(np.searchsorted(self._cumulated, random.random(), side="right"))
        examples = self._examples[min(at, len(self._examples) - 1)]
        features = {
            feature: self._bags(random, ids, examples) for feature, ids in self._ids.items()
        }
        return Request(self.model, examples, features)

    def _bags(
        self, random: np.random.Generator, ids: FeatureIds, examples: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        lengths = random.integers(
            0, self._settings.ids_max, size=examples, dtype=np.int32, endpoint=True
        )
        return ids.draw(random, int(lengths.sum()), self._settings.zipf), lengths


def choose_model(models: ModelList, name: str) -> ModelInfo:
    """Returns the model of that name: NAME, NAME@ALIAS or NAME@VERSION. Its `model` is this name.
    For "", returns the default model, or the only one. Raises ValueError if there is none."""
    served = {
        f"{model.model}@{model.alias}" if model.alias else model.model: model
        for model in models.models
    }
    by_name = dict(served)
    for model in models.models:  # like the server, which lists first what a name alone means
        by_name.setdefault(model.model, model)
        by_name.setdefault(f"{model.model}@{model.version}", model)
    name = name or models.default_model
    if name in by_name:
        return replace(by_name[name], model=name)
    if not name and len(served) == 1:
        return models.models[0]
    wrong = f"{name!r} is not served" if name else "the server has no default model"
    raise ValueError(f"--model: {wrong}; there are {', '.join(served) or 'none'}")


def kind_of_error(code: str, message: str) -> str:
    """Returns one line of the failures table for all errors that differ only in numbers.

    A rejection by a full queue (429 or RESOURCE_EXHAUSTED) is reported as "refused".
    """
    kind = "refused" if code in ("429", "RESOURCE_EXHAUSTED") else code
    return f"{kind}: {re.sub(r'[0-9]+', 'N', message)}"


def name_of(way: str, examples: int) -> str:
    """Returns the row of the statistics for requests of this size."""
    return f"{way}, {examples} example{'' if examples == 1 else 's'}"


def _bags(flat: NDArray[Any], lengths: NDArray[np.int32]) -> list[list[Any]]:
    values, ends = flat.tolist(), np.cumsum(lengths).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]
