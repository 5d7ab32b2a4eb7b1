"""Tests of the upload budget: grants in order, none while it is closed, and no bytes lost."""

from hypothesis import given
from hypothesis import strategies as st

from embedserve.wire.http2.upload_budget import OnGrant, UploadBudget


class Client:
    """A client that accepts grants as long as it ``accepts`` them."""

    def __init__(self) -> None:
        self.granted = 0
        self.accepts = True

    def grant(self, nbytes: int) -> bool:
        if self.accepts:
            self.granted += nbytes
        return self.accepts


def request_grants(uploads: UploadBudget, *sizes: int) -> list[Client]:
    clients = [Client() for _ in sizes]
    for client, size in zip(clients, sizes, strict=True):
        uploads.request(size, client.grant, lambda: True)
    return clients


def test_available_budget_is_granted_immediately() -> None:
    assert [one.granted for one in request_grants(UploadBudget(10, lambda: True), 4, 6)] == [4, 6]


def test_waiting_requests_are_granted_in_order() -> None:
    uploads = UploadBudget(10, lambda: True)
    clients = request_grants(uploads, 8, 5, 2, 3)
    assert [one.granted for one in clients] == [8, 0, 0, 0]  # 2 would fit, but 5 is first
    uploads.give_back(8)
    assert [one.granted for one in clients] == [8, 5, 2, 3]


def test_request_over_the_whole_budget_is_granted_exclusively() -> None:
    uploads = UploadBudget(10, lambda: True)
    small, large, other = request_grants(uploads, 1, 50, 1)
    assert (small.granted, large.granted, other.granted) == (1, 0, 0)
    uploads.give_back(1)
    assert (large.granted, other.granted) == (50, 0)
    uploads.give_back(50)
    assert other.granted == 1


def test_closed_budget_grants_nothing_until_a_retry() -> None:
    is_open = False
    uploads = UploadBudget(10, lambda: is_open)
    clients = request_grants(uploads, 4, 4)
    uploads.give_back(0)
    assert [one.granted for one in clients] == [0, 0]
    is_open = True
    uploads.retry()
    assert [one.granted for one in clients] == [4, 4]


def test_declined_grant_goes_to_the_next_waiting_client() -> None:
    uploads = UploadBudget(10, lambda: True)
    clients = request_grants(uploads, 10, 10, 10)
    clients[1].accepts = False
    uploads.give_back(10)
    assert [one.granted for one in clients] == [10, 0, 10]


@given(
    sizes=st.lists(st.integers(1, 30), max_size=12),
    departed=st.sets(st.integers(0, 11)),
    bytes_max=st.integers(1, 20),
)
def test_all_requests_are_granted_in_order_and_the_budget_is_restored(
    sizes: list[int], departed: set[int], bytes_max: int
) -> None:
    uploads = UploadBudget(bytes_max, lambda: True)
    order: list[int] = []
    held: list[int] = []

    def grant_of(number: int) -> OnGrant:
        def grant(nbytes: int) -> bool:
            if number in departed:
                return False
            order.append(number)
            held.append(nbytes)
            return True

        return grant

    for number, size in enumerate(sizes):
        uploads.request(size, grant_of(number), lambda: True)
        assert len(held) <= 1 or sum(held) <= bytes_max
    while held:
        uploads.give_back(held.pop(0))
        assert len(held) <= 1 or sum(held) <= bytes_max
    assert order == [number for number in range(len(sizes)) if number not in departed]
    last = request_grants(uploads, bytes_max)
    assert last[0].granted == bytes_max
