"""Tests of bulk lookups: many examples are split into requests and returned in order, for every
input type."""

import threading
from typing import Any

import numpy as np
import pytest
from client.fake import FakeModel, pooled

from embedserve_client import Overloaded, embed_in_batches
from embedserve_client.errors import InvalidRequest

BAGS = [[n % 100] * (n % 4) for n in range(1000)]


def test_results_are_complete_and_in_order(plain_client: Any, model: FakeModel) -> None:
    features: dict[str, Any] = {"movie": BAGS, "user": np.arange(1000) % 100}
    results = list(embed_in_batches(plain_client, features, examples=64))

    assert [one.batch_size for one in results] == [64] * 15 + [40]
    assert len(model.requests) == 16
    values = np.concatenate([one["movie"] for one in results])
    np.testing.assert_array_equal(values, pooled("movie", BAGS))
    users = np.concatenate([one["user"] for one in results])
    np.testing.assert_array_equal(users, pooled("user", [[n % 100] for n in range(1000)]))


def test_weights_are_split_like_their_ids(plain_client: Any) -> None:
    features = {"user": [[1, 2], [], [3], [4, 5]], "movie": [[9], [8], [], [7, 6]]}
    weights = {"movie": [[2.0], [3.0], [], [4.0, 5.0]]}
    whole = plain_client.embed(features, weights=weights)
    results = list(embed_in_batches(plain_client, features, weights=weights, examples=3))

    np.testing.assert_array_equal(np.concatenate([one.values for one in results]), whole.values)


def test_string_ids_are_split_into_batches(plain_client: Any) -> None:
    titles = [["Heat"], ["Alien", "no such film"], [], ["Alien"]]
    first, second = embed_in_batches(
        plain_client, {"title": titles}, model="sequence", examples=2, output_dtype="float16"
    )

    assert first["title"].values.tolist() == [[1, 2], [3, 4], [0, 0]]
    assert first["title"].values.dtype == np.float16
    assert second["title"].lengths.tolist() == [0, 1]
    assert second["title"].values.tolist() == [[3, 4]]


def test_error_ends_the_lookup_and_later_requests_are_not_sent(
    plain_client: Any, model: FakeModel
) -> None:
    model.rejections = ["RESOURCE_EXHAUSTED"] * 100

    with pytest.raises(Overloaded):
        list(embed_in_batches(plain_client, {"user": [[1]] * 1000}, examples=1, in_flight=2))
    assert len(model.requests) <= 4


class HeldClient:
    """A client whose calls fail only once ``may_fail`` is set."""

    def __init__(self) -> None:
        self.requested = threading.Semaphore(0)
        self.may_fail = threading.Event()
        self.count = 0

    def embed(self, features: Any, **_: Any) -> Any:
        self.count += 1
        self.requested.release()
        assert self.may_fail.wait(60)
        raise Overloaded("ordered by the test")


def test_requests_in_flight_never_exceed_the_given_limit() -> None:
    held_client: Any = HeldClient()
    results = embed_in_batches(held_client, {"user": [[1]] * 100}, examples=1, in_flight=3)

    def read_next_result() -> None:
        with pytest.raises(Overloaded):
            next(results)

    reader = threading.Thread(target=read_next_result)
    reader.start()
    for _ in range(3):
        assert held_client.requested.acquire(timeout=60)
    assert held_client.count == 3
    held_client.may_fail.set()
    reader.join(60)
    assert held_client.count <= 4


@pytest.mark.parametrize("name", ["examples", "in_flight"])
def test_zero_examples_or_requests_in_flight_are_rejected(name: str) -> None:
    client: Any = object()
    options: dict[str, Any] = {name: 0}
    with pytest.raises(InvalidRequest, match=f"{name}: 0 is not 1 or more"):
        embed_in_batches(client, {"user": [[1]]}, **options)


def test_error_names_the_range_of_its_examples(plain_client: Any) -> None:
    features = {"user": [[1]] * 5 + [[500]]}
    with pytest.raises(InvalidRequest, match=r"features\.user\[1\]: no row 500") as caught:
        list(embed_in_batches(plain_client, features, examples=4))

    assert caught.value.__notes__ == ["of the examples 4 to 5, counted from 0"]


def test_progress_is_shown_on_standard_error(
    plain_client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    list(embed_in_batches(plain_client, {"user": [[1]] * 10}, examples=5, progress=True))

    assert "10.0/10.0" in capsys.readouterr().err
