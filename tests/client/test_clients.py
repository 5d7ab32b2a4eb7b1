"""Tests of what all four clients have in common: vectors, models, errors, deadlines."""

from concurrent.futures import ThreadPoolExecutor
from inspect import getmembers, isfunction, signature
from typing import Any

import numpy as np
import pytest
from client.conftest import MAKERS, BlockingClient
from client.fake import FakeModel, pooled

from embedserve_client import (
    AsyncEmbedClient,
    AsyncGrpcEmbedClient,
    DeadlineExceeded,
    EmbedClient,
    EmbedServeClientError,
    GrpcEmbedClient,
    IdRule,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unavailable,
    UnknownModel,
)
from embedserve_proto import embedding_pb2 as pb


def test_embed_returns_the_pooled_rows_of_every_key(client: Any) -> None:
    result = client.embed({"movie": [[1, 2], [], [99]], "user": np.array([3, 4, 5])})

    np.testing.assert_array_equal(result["movie"], pooled("movie", [[1, 2], [], [99]]))
    np.testing.assert_array_equal(result["user"], pooled("user", [[3], [4], [5]]))
    assert (result.model, result.version, result.batch_size) == ("shop", 7, 3)
    assert (result.keys, result.length_per_key) == (("user", "movie"), (2, 4))


def test_feature_missing_from_the_request_has_zero_vectors(client: Any) -> None:
    result = client.embed({"user": [5, 6]}, model="shop")

    np.testing.assert_array_equal(result["user"], pooled("user", [[5, 6]]))
    np.testing.assert_array_equal(result["movie"], np.zeros((1, 4)))


def test_weights_are_sent_to_the_server(client: Any) -> None:
    result = client.embed({"user": [[1, 2]], "movie": [[3]]}, weights={"user": [[0.5, 2.0]]})

    np.testing.assert_array_equal(result["user"], [[0.5 * 2 + 2.0 * 4, 0.5 * 3 + 2.0 * 5]])
    np.testing.assert_array_equal(result["movie"], pooled("movie", [[3]]))


def test_unpooled_model_returns_a_row_for_each_string_id(client: Any) -> None:
    titles = [["Heat", "no such film"], [], ["Alien"]]
    result = client.embed({"title": titles}, model="sequence")

    assert result["title"].values.tolist() == [[1, 2], [0, 0], [3, 4]]
    assert result["title"].lengths.tolist() == [2, 0, 1]
    assert result.unknown_ids == {"title": 1}
    assert (result.is_pooled, result.batch_size) == (False, 3)


def test_string_ids_may_be_numpy_arrays(client: Any) -> None:
    result = client.embed({"title": np.array(["Alien", "Heat"])}, model="sequence")

    assert result["title"].values.tolist() == [[3, 4], [1, 2]]
    assert result.unknown_ids == {}


def test_requested_float16_output_is_returned(client: Any, model: FakeModel) -> None:
    features = {"movie": [[1, 2], [], [99]], "user": np.array([3, 4, 5])}
    weights = {"movie": [[0.1, 1], [], [1000]]}
    whole = client.embed(features, weights=weights)
    halves = client.embed(features, weights=weights, output_dtype="float16")

    assert (whole.values.dtype, halves.values.dtype) == (np.float32, np.float16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(halves.values, whole.values.astype(np.float16))
    assert halves.values.nbytes == whole.values.nbytes // 2
    assert np.isinf(halves["movie"][2]).all()
    assert not halves.values.flags.owndata
    assert [request.output_dtype for request in model.requests] == [pb.FLOAT32, pb.FLOAT16]


def test_output_keys_are_sent_to_the_server(client: Any, model: FakeModel) -> None:
    client.embed({"user": [1]}, output_keys=["user"])

    assert [list(request.output_keys) for request in model.requests] == [["user"]]


def test_min_seq_is_sent_to_the_server(client: Any, model: FakeModel) -> None:
    for seq in (None, 0, 1234):
        client.embed({"user": [1]}, min_seq=seq)
    requested_seqs = [
        request.min_seq if request.HasField("min_seq") else None for request in model.requests
    ]
    assert requested_seqs == [None, 0, 1234]


@pytest.mark.parametrize("seq", [-1, 2**63, "7", True, 1.5])
def test_invalid_min_seq_is_rejected_before_sending(
    client: Any, model: FakeModel, seq: Any
) -> None:
    with pytest.raises(InvalidRequest, match=f"min_seq: .* is no integer from 0 to {2**63 - 1}"):
        client.embed({"user": [1]}, min_seq=seq)
    assert not model.requests


def test_unpooled_rows_may_be_float16(client: Any) -> None:
    titles = {"title": [["Heat"], ["Alien"]]}
    rows = client.embed(titles, model="sequence", output_dtype="float16")["title"]

    assert (rows.values.dtype, rows.values.tolist()) == (np.float16, [[1, 2], [3, 4]])


def test_float32_from_a_server_without_float16_is_accepted(client: Any) -> None:
    result = client.embed({"user": [5]}, model="old", output_dtype="float16")

    assert result.values.dtype == np.float32
    np.testing.assert_array_equal(result["user"], pooled("user", [[5]]))


@pytest.mark.parametrize("name", ["bfloat16", "FLOAT16", "", None, 1, ["float16"], np.float16])
def test_unsupported_output_dtype_is_rejected_before_sending(
    client: Any, model: FakeModel, name: Any
) -> None:
    with pytest.raises(InvalidRequest, match="is not float32 or float16") as caught:
        client.embed({"user": [1]}, output_dtype=name)

    assert caught.value.message.startswith("output_dtype: ")
    assert caught.value.field == "output_dtype"
    assert model.requests == []


def test_models_are_returned_as_records(client: Any) -> None:
    listed = client.models()

    assert listed.default_model == "shop"
    assert listed.models == (client.model("shop"),)
    (shop,) = listed.models
    assert (shop.version, shop.features, shop.length_per_key) == (7, ("user", "movie"), (2, 4))
    (table,) = shop.tables
    assert (table.num_embeddings, table.dtype, table.sharding) == (100, "int8", "row_wise")
    assert table.ids == IdRule("map", "string", 9, 0, 0, "row", 3, ("Heat",))
    assert shop.is_pooled


def test_unknown_model_name_raises_unknown_model(client: Any) -> None:
    with pytest.raises(UnknownModel, match="no model"):
        client.model("books")
    with pytest.raises(UnknownModel, match="no model 'books'"):
        client.embed({"user": [1]}, model="books")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("NOT_FOUND", UnknownModel),
        ("RESOURCE_EXHAUSTED", Overloaded),
        ("DEADLINE_EXCEEDED", DeadlineExceeded),
        ("UNAVAILABLE", Unavailable),
        ("INTERNAL", ServerError),
    ],
)
def test_every_error_code_raises_its_exception_class(
    client: Any, code: str, kind: type[EmbedServeClientError]
) -> None:
    with pytest.raises(EmbedServeClientError) as caught:
        client.embed({"user": [1]}, model=f"fail:{code}")

    assert type(caught.value) is kind
    assert caught.value.message == str(caught.value) == "ordered by the test"


def test_server_message_about_an_invalid_id_is_passed_on(client: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"features\.user\[1\]: no row 500") as caught:
        client.embed({"user": [[1], [500]]})

    assert caught.value.field == ("" if client.over_grpc else "features.user[1]")


def test_invalid_arguments_are_rejected_before_sending(client: Any, model: FakeModel) -> None:
    with pytest.raises(ValueError, match=r"features\.user\[0\]: 1\.5 is float"):
        client.embed({"user": [[1.5]]})
    with pytest.raises(ValueError, match="timeout_s: 0 is not above 0 and at most"):
        client.embed({"user": [[1]]}, timeout_s=0)

    assert model.requests == []


def test_slow_response_raises_deadline_exceeded(client: Any, model: FakeModel) -> None:
    model.may_respond.clear()

    with pytest.raises(DeadlineExceeded):
        client.embed({"user": [1]}, timeout_s=0.05)

    model.may_respond.set()
    assert client.embed({"user": [1]}).batch_size == 1


@pytest.mark.parametrize("make", MAKERS.values())
def test_missing_server_raises_unavailable(make: Any) -> None:
    client = BlockingClient(make, "http://127.0.0.1:1")
    with pytest.raises(Unavailable) as caught:
        client.embed({"user": [1]})
    client.shut()

    assert caught.value.__cause__ is not None
    assert "127.0.0.1:1" in caught.value.message


@pytest.mark.parametrize("make", MAKERS.values())
def test_invalid_timeout_is_rejected_by_the_constructor(make: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s: -1 "):
        make("http://127.0.0.1:1", timeout_s=-1)


def test_threads_share_a_client(plain_client: Any) -> None:
    with ThreadPoolExecutor(max_workers=4) as pool:
        results = list(pool.map(lambda n: plain_client.embed({"user": [n]}), range(40)))

    for n, result in enumerate(results):
        np.testing.assert_array_equal(result["user"], pooled("user", [[n]]))


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [(EmbedClient, AsyncEmbedClient), (GrpcEmbedClient, AsyncGrpcEmbedClient)],
)
def test_sync_and_async_clients_have_the_same_methods_and_arguments(
    sync: type, asynchronous: type
) -> None:
    def arguments(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
        return {
            name: [
                (one.name, one.kind, one.default) for one in signature(method).parameters.values()
            ]
            for name, method in getmembers(kind, isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert arguments(sync) == arguments(asynchronous)
    assert len(arguments(sync)) >= 5
