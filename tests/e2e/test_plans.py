"""Tests of one server with a model for each plan and dtype: responses equal the source's rows."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from reference import Bags, assert_same, dequantized_int8, pooled, random_bags
from running_servers import ANSWER_S_MAX, Running, running
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from embedserve_client import (
    AsyncEmbedClient,
    AsyncGrpcEmbedClient,
    EmbedClient,
    GrpcEmbedClient,
    InvalidRequest,
    UnknownModel,
)
from embedserve_store import publish

ROWS = 4096
DTYPES: dict[str, str | dict[str, str]] = {
    "float32": "float32",
    "int8": "int8",
    "mixed": {"product_table": "float32", "user_table": "int8"},
}
PLANS = [
    (dtype, sharding, ranks)
    for dtype, ranks in (("float32", 1), ("int8", 1), ("mixed", 2), ("mixed", 4))
    for sharding in ("table_wise", "row_wise")
] + [("int8", "column_wise", 2), ("float32", "column_wise", 4), ("float32", "data_parallel", 2)]
"""(dtype, sharding, ranks) of each plan.

Plans over several ranks take a second or more to compile; "mixed" has both dtypes in one model."""

DEFAULT = ("mixed", "row_wise", 2)


def name(dtype: str, sharding: str, ranks: int) -> str:
    return f"{dtype}_{sharding}_{ranks}"


@pytest.fixture(scope="module")
def ebc() -> EmbeddingBagCollection:
    """Returns the model of TorchRec's introductory example."""
    torch.manual_seed(1)
    return EmbeddingBagCollection(
        device="cpu",
        tables=[
            EmbeddingBagConfig(
                name=f"{feature}_table",
                embedding_dim=64,
                num_embeddings=ROWS,
                feature_names=[feature],
                pooling=PoolingType.SUM,
            )
            for feature in ("product", "user")
        ],
    )


@pytest.fixture(scope="module")
def server(
    ebc: EmbeddingBagCollection, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("plans")
    for dtype, sharding, ranks in PLANS:
        publish(
            ebc,
            folder / "store",
            model=name(dtype, sharding, ranks),
            dtype=DTYPES[dtype],
            sharding=sharding,
            world_size=ranks,
        )
    default = ("--default-model", name(*DEFAULT))
    with running(folder / "store", folder / "log", *default) as server:
        yield server


def tables(ebc: EmbeddingBagCollection, dtype: str) -> dict[str, np.ndarray]:
    rows = {
        table.removesuffix("_table"): bag.weight.detach().numpy()
        for table, bag in ebc.embedding_bags.items()
    }
    quantized = {"float32": (), "int8": ("product", "user"), "mixed": ("user",)}[dtype]
    return {t: dequantized_int8(r) if t in quantized else r for t, r in rows.items()}


def expected_values(rows: dict[str, np.ndarray], bags: Bags) -> np.ndarray:
    return np.concatenate([pooled(rows[f], bags[f]) for f in ("product", "user")], axis=1)


def test_introductory_example_is_a_keyed_tensor_of_3_by_128(
    server: Running, ebc: EmbeddingBagCollection
) -> None:
    bags = {"product": [[101, 202], [], [303]], "user": [[404], [505], [606]]}
    with EmbedClient(server.http) as client:
        keyed = client.embed(bags).to_keyed_tensor()
    assert keyed.keys() == ["product", "user"]
    assert keyed.values().shape == (3, 128)
    assert_same(keyed.values().numpy(), expected_values(tables(ebc, DEFAULT[0]), bags))


@pytest.mark.parametrize(("dtype", "sharding", "ranks"), PLANS)
def test_every_plan_returns_exact_vectors_over_both_protocols(
    server: Running, ebc: EmbeddingBagCollection, dtype: str, sharding: str, ranks: int
) -> None:
    bags = random_bags(np.random.default_rng(2), {"product": ROWS, "user": ROWS}, 9)
    model = name(dtype, sharding, ranks)
    with EmbedClient(server.http) as rest, GrpcEmbedClient(server.grpc) as grpc:
        assert sum(len(t.features) for t in rest.model(model).tables) == 2
        over_rest, over_grpc = rest.embed(bags, model=model), grpc.embed(bags, model=model)
    assert_same(over_rest.values, expected_values(tables(ebc, dtype), bags))
    np.testing.assert_array_equal(over_rest.values, over_grpc.values)


async def test_each_of_a_thousand_mixed_requests_gets_its_own_result(
    server: Running, ebc: EmbeddingBagCollection
) -> None:
    """Checks that requests of a batch do not affect each other.

    Valid ones get exact results, invalid ones their own error.
    """
    rng = np.random.default_rng(4)
    rows = tables(ebc, DEFAULT[0])

    async def check_request(client: AsyncEmbedClient | AsyncGrpcEmbedClient, number: int) -> str:
        bags = random_bags(rng, {"product": ROWS, "user": ROWS}, int(rng.integers(1, 5)))
        unknown_id = ROWS + number
        kind = ("valid", "valid", "valid", "id", "feature", "model")[number % 6]
        if kind == "id":
            bags["product"][-1] = [1, unknown_id]
            with pytest.raises(InvalidRequest, match=f"is {unknown_id}: ids of 'product'"):
                await client.embed(bags)
        elif kind == "feature":
            with pytest.raises(InvalidRequest, match=f"features.f{number}: model"):
                await client.embed({**bags, f"f{number}": bags["user"]})
        elif kind == "model":
            with pytest.raises(UnknownModel, match=f"'m{number}'"):
                await client.embed(bags, model=f"m{number}")
        else:
            assert_same((await client.embed(bags)).values, expected_values(rows, bags))
        return kind

    async with (
        AsyncEmbedClient(server.http, timeout_s=ANSWER_S_MAX) as rest,
        AsyncGrpcEmbedClient(server.grpc, timeout_s=ANSWER_S_MAX) as grpc,
    ):
        semaphore = asyncio.Semaphore(64)

        async def check_with_limit(number: int) -> str:
            async with semaphore:
                return await check_request((rest, grpc)[number // 6 % 2], number)

        kinds = await asyncio.gather(*[check_with_limit(number) for number in range(1002)])
    assert kinds.count("valid") == 501
