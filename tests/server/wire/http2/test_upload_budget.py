"""Tests of the upload budget: grants in order, none while it is closed, and no bytes lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from embedserve.wire.http2.upload_budget import Grant, UploadBudget


class Client:
    """A client that accepts grants as long as it ``wants`` them."""

    def __init__(self) -> None:
        self.granted = 0
        self.wants = True

    def grant(self, nbytes: int) -> bool:
        if self.wants:
            self.granted += nbytes
        return self.wants


def ask(uploads: UploadBudget, *sizes: int) -> list[Client]:
    clients = [Client() for _ in sizes]
    for client, size in zip(clients, sizes, strict=True):
        uploads.request(size, client.grant)
    return clients


def test_what_is_there_is_granted_at_once() -> None:
    assert [one.granted for one in ask(UploadBudget(10, lambda: True), 4, 6)] == [4, 6]


def test_those_who_wait_are_granted_in_turn() -> None:
    uploads = UploadBudget(10, lambda: True)
    clients = ask(uploads, 8, 5, 2, 3)
    assert [one.granted for one in clients] == [8, 0, 0, 0]  # 2 would fit, but 5 is first
    uploads.give_back(8)
    assert [one.granted for one in clients] == [8, 5, 2, 3]


def test_one_who_wants_more_than_all_gets_it_alone() -> None:
    uploads = UploadBudget(10, lambda: True)
    small, large, other = ask(uploads, 1, 50, 1)
    assert (small.granted, large.granted, other.granted) == (1, 0, 0)
    uploads.give_back(1)
    assert (large.granted, other.granted) == (50, 0)
    uploads.give_back(50)
    assert other.granted == 1


def test_nothing_is_granted_while_it_is_shut() -> None:
    is_open = False
    uploads = UploadBudget(10, lambda: is_open)
    clients = ask(uploads, 4, 4)
    uploads.give_back(0)
    assert [one.granted for one in clients] == [0, 0]
    is_open = True
    uploads.retry()
    assert [one.granted for one in clients] == [4, 4]


def test_what_one_who_went_away_would_have_got_goes_to_the_next() -> None:
    uploads = UploadBudget(10, lambda: True)
    clients = ask(uploads, 10, 10, 10)
    clients[1].wants = False
    uploads.give_back(10)
    assert [one.granted for one in clients] == [10, 0, 10]


@given(
    sizes=st.lists(st.integers(1, 30), max_size=12),
    gone=st.sets(st.integers(0, 11)),
    bytes_max=st.integers(1, 20),
)
def test_in_the_end_all_are_granted_and_all_is_back(
    sizes: list[int], gone: set[int], bytes_max: int
) -> None:
    uploads = UploadBudget(bytes_max, lambda: True)
    order: list[int] = []
    held: list[int] = []

    def grant_of(number: int) -> Grant:
        def grant(nbytes: int) -> bool:
            if number in gone:
                return False
            order.append(number)
            held.append(nbytes)
            return True

        return grant

    for number, size in enumerate(sizes):
        uploads.request(size, grant_of(number))
        assert len(held) <= 1 or sum(held) <= bytes_max
    while held:
        uploads.give_back(held.pop(0))
        assert len(held) <= 1 or sum(held) <= bytes_max
    assert order == [number for number in range(len(sizes)) if number not in gone]
    last = ask(uploads, bytes_max)
    assert last[0].granted == bytes_max
