"""Tests of raw ids, strings, unknown ids and unpooled rows, over REST, gRPC and its stream."""

import json
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from running_servers import ANSWER_S_MAX, Running, running
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)

from embedserve_client import EmbedClient, GrpcEmbedClient, InvalidRequest, StreamRequest
from embedserve_store import IdRule, publish

ROWS = 50
TAGS = ["drama", "comédie", "映画", ""]
USERS = (np.arange(ROWS) * 977 - 2**40).tolist()


@dataclass(frozen=True)
class ServedModels:
    bags: EmbeddingBagCollection
    rows: EmbeddingCollection
    server: Running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModels]:
    folder = tmp_path_factory.mktemp("ids")
    torch.manual_seed(0)
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="user",
                num_embeddings=ROWS,
                embedding_dim=8,
                feature_names=["user"],
                pooling=PoolingType.MEAN,
            ),
            EmbeddingBagConfig(
                name="tag", num_embeddings=4, embedding_dim=4, feature_names=["tag"]
            ),
            EmbeddingBagConfig(
                name="city", num_embeddings=7, embedding_dim=4, feature_names=["city"]
            ),
        ]
    )
    rows = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name="item", num_embeddings=ROWS, embedding_dim=8, feature_names=["item", "last"]
            ),
            EmbeddingConfig(name="word", num_embeddings=4, embedding_dim=8, feature_names=["word"]),
        ]
    )
    options: dict[str, Any] = {"sharding": "row_wise", "world_size": 2}
    publish(
        bags,
        folder / "store",
        model="bags",
        ids={
            "user": IdRule(rule="map", unknown="skip"),
            "tag": IdRule(rule="map", id_type="string", unknown="row", default_row=1),
            "city": IdRule(rule="modulo"),
        },
        vocabularies={"user": USERS, "tag": TAGS},
        **options,
    )
    publish(
        rows,
        folder / "store",
        model="rows",
        ids={"item": IdRule(unknown="skip"), "word": IdRule(rule="map", id_type="string")},
        vocabularies={"word": TAGS},
        **options,
    )
    with running(folder / "store", folder / "log", "--default-model", "bags") as server:
        yield ServedModels(bags, rows, server)


def weight(collection: EmbeddingBagCollection | EmbeddingCollection, table: str) -> np.ndarray:
    state = {key.split(".")[-2]: rows for key, rows in collection.state_dict().items()}
    result: np.ndarray = state[table].numpy()
    return result


REQUEST: dict[str, list[list[Any]]] = {
    "user": [[USERS[3], 5, USERS[4]], [6], [USERS[0]]],
    "tag": [["war"], ["drama", ""], []],
    "city": [[2**62 + 1], [-1], [6, 7]],
}


def test_ids_are_mapped_to_rows_by_the_rule_of_their_table(served: ServedModels) -> None:
    user, tag, city = (weight(served.bags, name) for name in ("user", "tag", "city"))
    expected = np.stack(
        [
            np.concatenate([(user[3] + user[4]) / 2, tag[1], city[(2**62 + 1) % 7]]),
            np.concatenate([np.zeros(8, np.float32), tag[0] + tag[3], city[6]]),
            np.concatenate([user[0], np.zeros(4, np.float32), city[6] + city[0]]),
        ]
    )
    with EmbedClient(served.server.http) as rest, GrpcEmbedClient(served.server.grpc) as grpc:
        results = [
            rest.embed(REQUEST),
            grpc.embed(REQUEST),
            *(one.result() for one in grpc.embed_stream([REQUEST])),
        ]
    for result in results:
        np.testing.assert_allclose(result.values, expected, rtol=0, atol=1e-6)
        assert result.unknown_ids == {"user": 2, "tag": 1}


def test_json_response_counts_unknown_ids(served: ServedModels) -> None:
    answer = post(served, "bags", REQUEST)
    assert answer["unknown_ids"] == {"user": 2, "tag": 1}
    known = post(served, "bags", {"user": [USERS[1]]})
    assert "unknown_ids" not in known


def test_metrics_count_unknown_ids(served: ServedModels) -> None:
    def unknown_ids_metric() -> float:
        lines = served.server.metrics().splitlines()
        labels = 'alias="",feature="user",model="bags",version="1"'
        name = f"embedserve_unknown_ids_total{{{labels}}}"
        return float(next(line for line in lines if line.startswith(name)).split()[-1])

    before = unknown_ids_metric()
    post(served, "bags", {"user": [[1, 2, 3], []]})
    assert unknown_ids_metric() == before + 3


def test_unpooled_model_returns_the_row_of_every_id(served: ServedModels) -> None:
    item, word = weight(served.rows, "item"), weight(served.rows, "word")
    request: dict[str, list[list[Any]]] = {
        "item": [[1, ROWS + 10, 3], []],
        "last": [[4], [5, 6]],
        "word": [["drama"], ["映画", ""]],
    }
    zeros = np.zeros((1, 8), np.float32)
    expected = {
        "item": np.concatenate([item[[1]], zeros, item[[3]]]),
        "last": item[[4, 5, 6]],
        "word": word[[0, 2, 3]],
    }
    with EmbedClient(served.server.http) as rest, GrpcEmbedClient(served.server.grpc) as grpc:
        results = [
            rest.embed(request, model="rows"),
            grpc.embed(request, model="rows"),
            *(one.result() for one in grpc.embed_stream([StreamRequest(request, model="rows")])),
        ]
    for result in results:
        assert result.unknown_ids == {"item": 1}
        for key, rows in expected.items():
            np.testing.assert_array_equal(result[key].values, rows)
        assert result["item"].lengths.tolist() == [3, 0]
        jagged = result.to_jagged_tensors()
        assert jagged["last"].lengths().tolist() == [1, 2]
    answer = post(served, "rows", request)
    assert answer["lengths"] == {"item": [3, 0], "last": [1, 2], "word": [1, 2]}
    np.testing.assert_array_equal(np.float32(answer["values"]["last"]), expected["last"])


@pytest.mark.parametrize(
    ("model", "features", "message"),
    [
        ("rows", {"word": [["war"]]}, r"features\.word\[0\]\[0\] is 'war': not one of the 4 ids"),
        ("bags", {"tag": [[7]]}, r"features\.tag\[0\]\[0\] is 7: ids of 'tag' are strings"),
        ("bags", {"user": [["u"]]}, r"features\.user\[0\]\[0\] is 'u': ids of 'user' are integers"),
    ],
)
def test_invalid_ids_are_named_in_the_error(
    served: ServedModels, model: str, features: dict[str, Any], message: str
) -> None:
    with EmbedClient(served.server.http) as rest, GrpcEmbedClient(served.server.grpc) as grpc:
        for client in (rest, grpc):
            with pytest.raises(InvalidRequest, match=message):
                client.embed(features, model=model)


def test_printed_curl_command_uses_ids_of_the_vocabulary(served: ServedModels) -> None:
    line = next(
        line.strip() for line in served.server.log.read_text().splitlines() if "curl" in line
    )
    assert "drama" in line
    done = subprocess.run(shlex.split(line), capture_output=True, check=True)
    answer = json.loads(done.stdout)
    assert "unknown_ids" not in answer
    assert np.any(answer["values"])


def post(served: ServedModels, model: str, features: dict[str, Any]) -> dict[str, Any]:
    url = f"{served.server.http}/models/{model}/embed"
    answer = httpx.post(url, json={"features": features}, timeout=ANSWER_S_MAX)
    read: dict[str, Any] = answer.raise_for_status().json()
    return read
