"""Workers move to another version all together, or none of them does."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from embedserve.processes.rollout_coordinator import RolloutCoordinator
from embedserve.processes.rollout_messages import (
    MESSAGE_BYTES_MAX,
    RolloutMessage,
    RolloutStep,
    WorkerMessage,
    refused,
    unopened,
)
from embedserve_store import StoreError

PATH = "/store/shop/8"
FOUND = RolloutMessage(RolloutStep.AVAILABLE, "shop", 8, PATH)
PREPARE = RolloutMessage(RolloutStep.PREPARE, "shop", 8, PATH)
PREPARED = RolloutMessage(RolloutStep.PREPARED, "shop", 8)
SWITCH = RolloutMessage(RolloutStep.SWITCH, "shop", 8)
REFUSED = refused("shop", 8, "damaged")
UNOPENED = unopened("shop", 8, "is cut")


class Workers:
    """What the workers of a server are told."""

    def __init__(self) -> None:
        self.together = RolloutCoordinator({"shop": 7, "films": 1}, self._adopt)
        self.ended_by_us: list[int] = []
        self.together.send = self._send
        self.together.end = self.ended_by_us.append
        self.adopted: list[tuple[str, str | None]] = []
        self.damage = ""
        self._told: list[tuple[int, object]] = []
        self.attempts: dict[tuple[int, str], int] = {}

    def _adopt(self, name: str, path: str | None) -> None:
        if self.damage:
            raise StoreError(self.damage)
        self.adopted.append((name, path))

    def _send(self, worker: int, message: bytes) -> None:
        if message in (WorkerMessage.WATCH_STORE.value, WorkerMessage.RELOAD.value):
            self._told.append((worker, message.decode()))
            return
        move = RolloutMessage.from_bytes(message)
        if move.step is RolloutStep.PREPARE:
            self.attempts[worker, move.name] = move.attempt
        self._told.append((worker, replace(move, attempt=0)))

    def start(self, *workers: int) -> None:
        for worker in workers:
            self.together.start(worker)
            self.together.on_worker_ready(worker)

    def hear(self, *workers: int, message: RolloutMessage) -> None:
        """What is said of a version that was to be prepared is of the last attempt."""
        for worker in workers:
            attempt = self.attempts.get((worker, message.name), 0)
            is_answer = message.step in (RolloutStep.PREPARED, RolloutStep.REFUSED)
            self.together.on_message(
                worker, replace(message, attempt=attempt) if is_answer else message
            )

    def told(self) -> list[tuple[int, object]]:
        """Since this was asked."""
        told, self._told = self._told, []
        return told


@pytest.fixture
def workers() -> Workers:
    """Two, of which the first looks at the store."""
    workers = Workers()
    workers.start(0, 1)
    assert workers.told() == [(0, "look")]
    return workers


def test_all_prepare_and_then_all_switch(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wanted = RolloutMessage(RolloutStep.DESIRED, "shop", 8)
    workers.hear(0, message=wanted)
    assert workers.told() == [(0, wanted), (1, wanted)]
    workers.hear(0, message=FOUND)
    assert workers.told() == [(0, PREPARE), (1, PREPARE)]
    workers.hear(0, message=PREPARED)
    workers.hear(0, message=FOUND)  # it looked again meanwhile
    assert workers.told() == []
    workers.hear(1, message=PREPARED)
    assert workers.told() == [(0, SWITCH), (1, SWITCH)]
    assert workers.adopted == [("shop", PATH)]
    workers.hear(0, message=FOUND)
    assert workers.told() == []
    assert caplog.messages == ["shop is answered by version 8 from now on, no more by 7"]


def test_where_one_cannot_none_does_and_it_is_said_once(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.hear(0, message=FOUND)
    workers.told()
    workers.hear(0, message=PREPARED)
    workers.hear(1, message=REFUSED)
    assert workers.told() == [(0, REFUSED), (1, REFUSED)]
    workers.hear(0, message=REFUSED)
    assert workers.told() == []
    workers.hear(0, message=FOUND)
    assert workers.told() == [(0, REFUSED)]
    assert caplog.messages == ["shop: version 8 stays out: damaged"]
    # Once another was wanted, it may be tried again.
    for number in (7, 8):
        workers.hear(0, message=RolloutMessage(RolloutStep.DESIRED, "shop", number))
    workers.told()
    workers.hear(0, message=FOUND)
    assert workers.told() == [(0, PREPARE), (1, PREPARE)]


def test_one_version_is_prepared_at_a_time(workers: Workers) -> None:
    other = RolloutMessage(RolloutStep.AVAILABLE, "films", 2, "/store/films/2")
    workers.hear(0, message=FOUND)
    workers.told()
    workers.hear(0, message=other)
    assert workers.told() == []
    workers.hear(0, 1, message=PREPARED)
    workers.told()
    workers.hear(0, message=other)
    assert [worker for worker, _ in workers.told()] == [0, 1]


def test_what_is_not_wanted_any_more_does_not_take_over(workers: Workers) -> None:
    workers.hear(0, message=FOUND)
    workers.hear(0, message=PREPARED)
    workers.hear(0, message=RolloutMessage(RolloutStep.DESIRED, "shop", 7))
    workers.told()
    workers.hear(1, message=PREPARED)
    assert workers.told() == []
    assert workers.adopted == []
    workers.hear(0, message=FOUND)
    assert workers.told() == [(0, PREPARE), (1, PREPARE)]


def test_a_worker_that_becomes_ready_meanwhile_is_waited_for(workers: Workers) -> None:
    workers.together.start(2)
    workers.hear(0, message=FOUND)
    workers.told()
    workers.together.on_worker_ready(2)
    assert workers.told() == [(2, PREPARE)]
    workers.hear(0, 1, message=PREPARED)
    assert workers.told() == []
    workers.hear(2, message=PREPARED)
    assert workers.told() == [(0, SWITCH), (1, SWITCH), (2, SWITCH)]


def test_one_that_was_started_before_the_switch_follows_it(workers: Workers) -> None:
    workers.hear(0, message=RolloutMessage(RolloutStep.DESIRED, "shop", 8))
    workers.together.start(2)
    workers.hear(0, message=FOUND)
    workers.hear(0, 1, message=PREPARED)
    workers.told()
    workers.together.on_worker_ready(2)
    assert workers.told() == [(2, RolloutMessage(RolloutStep.DESIRED, "shop", 8)), (2, PREPARE)]
    workers.hear(2, message=PREPARED)
    assert workers.told() == [(2, SWITCH)]
    workers.start(3)
    assert workers.told() == [(3, RolloutMessage(RolloutStep.DESIRED, "shop", 8))]


def test_so_does_one_that_starts_with_the_version_before_for_the_new_one_is_gone(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.damage = "8 was deleted"
    workers.hear(0, message=FOUND)
    workers.hear(0, 1, message=PREPARED)
    workers.told()
    assert caplog.messages == ["shop: workers start with version 7 still: 8 was deleted"]
    workers.start(2)
    assert workers.told() == [(2, PREPARE)]
    workers.hear(2, message=REFUSED)  # those that answer with it go on
    assert workers.told() == []
    assert workers.ended_by_us == [2]
    assert caplog.messages[-1] == "worker 2 cannot follow the others to shop version 8: damaged"
    workers.damage = ""
    workers.start(2)  # in its place
    assert workers.told() == []
    assert workers.adopted == [("shop", PATH)]


def test_a_worker_that_ends_is_not_waited_for(workers: Workers) -> None:
    workers.hear(0, message=FOUND)
    workers.hear(0, message=PREPARED)
    workers.told()
    workers.together.on_worker_exit(1, "was ended by SIGKILL")
    assert workers.told() == [(0, SWITCH)]


def test_where_all_ended_those_that_come_prepare_it(workers: Workers) -> None:
    workers.hear(0, message=FOUND)
    workers.hear(0, message=PREPARED)
    for worker in (0, 1):
        workers.together.on_worker_exit(worker, "was ended by SIGKILL")
    assert workers.adopted == []
    workers.told()
    workers.start(0)
    assert workers.told() == [(0, "look"), (0, PREPARE)]
    workers.hear(0, message=PREPARED)
    assert workers.told() == [(0, SWITCH)]


def test_a_version_that_ends_workers_stays_out(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.hear(0, message=FOUND)
    workers.together.on_worker_exit(0, "was ended by SIGSEGV")
    workers.told()
    workers.together.on_worker_exit(1, "was ended by SIGSEGV")
    reason = "a worker was ended by SIGSEGV while it was loaded"
    assert caplog.messages == [f"shop: version 8 stays out: {reason}"]
    workers.start(0)
    assert workers.told() == [(0, "look"), (0, refused("shop", 8, reason))]
    workers.hear(0, message=FOUND)
    assert workers.told() == [(0, refused("shop", 8, reason))]


def test_another_looks_when_the_one_that_did_ends(workers: Workers) -> None:
    workers.together.on_worker_exit(0, "was ended by SIGKILL")
    assert workers.told() == [(1, "look")]
    workers.start(0)
    assert workers.told() == []
    workers.together.on_worker_exit(1, "was ended by SIGKILL")
    assert workers.told() == [(0, "look")]


def test_messages_are_read_as_they_were_written() -> None:
    long = refused("m" * 100, 2**31, "é\n" * 5000)
    assert len(long.to_bytes()) < MESSAGE_BYTES_MAX
    assert RolloutMessage.from_bytes(long.to_bytes()) == long
    found = RolloutMessage(RolloutStep.AVAILABLE, "m", 1, "/" + "ö" * 2000)
    assert len(found.to_bytes()) < MESSAGE_BYTES_MAX
    assert RolloutMessage.from_bytes(found.to_bytes()) == found


def test_what_one_joins_and_what_comes_next_do_not_mix(workers: Workers) -> None:
    """A worker that started with version 7 is to follow to 8, and 9 is found meanwhile."""
    nine = RolloutMessage(RolloutStep.AVAILABLE, "shop", 9, "/store/shop/9")
    workers.together.start(2)
    workers.hear(0, message=FOUND)
    workers.hear(0, 1, message=PREPARED)
    workers.together.on_worker_ready(2)
    eight = workers.attempts[2, "shop"]
    workers.hear(0, message=nine)
    workers.told()
    workers.together.on_message(2, replace(PREPARED, attempt=eight))  # it was too late to stop it
    assert workers.told() == []
    workers.hear(0, message=refused("shop", 9, "damaged"))
    told = workers.told()
    assert told[3:] == [(2, PREPARE)]  # back to what the others answer with
    workers.hear(2, message=PREPARED)
    assert workers.told() == [(2, SWITCH)]


def test_what_was_found_and_cannot_be_opened_is_refused(workers: Workers) -> None:
    for _ in range(2):
        workers.together.on_message(0, REFUSED)
        assert (0, REFUSED) in workers.told()


def test_all_show_a_version_that_cannot_be_opened_and_prepare_it_once_it_can(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        workers.hear(0, message=UNOPENED)
    assert workers.told() == [(0, UNOPENED), (1, UNOPENED)]
    workers.start(2)
    assert workers.told() == [(2, UNOPENED)]
    workers.hear(0, message=FOUND)
    assert workers.told() == [(i, PREPARE) for i in range(3)]
    workers.hear(0, message=UNOPENED)  # an old look, while they load it
    assert workers.told() == []
    workers.hear(1, message=REFUSED)
    assert workers.told() == [(i, REFUSED) for i in range(3)]
    workers.start(3)
    assert workers.told() == [(3, REFUSED)]
    assert [line.partition(" out: ")[2] for line in caplog.messages] == ["is cut", "damaged"]


def test_why_it_cannot_be_opened_is_told_anew_and_logged_where_more_than_numbers_change(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = ["the disk has 1,024 free", "the disk has 88 free", "is cut"]
    for reason in reasons:
        for _ in range(2):
            workers.hear(0, message=unopened("shop", 8, reason))
        assert workers.told() == [(i, unopened("shop", 8, reason)) for i in range(2)]
    logged = [line.partition(" out: ")[2] for line in caplog.messages]
    assert logged == [reasons[0], reasons[2]]


def test_one_that_can_be_opened_while_another_is_prepared_is_found_again(workers: Workers) -> None:
    workers.hear(0, message=UNOPENED)
    workers.hear(0, message=RolloutMessage(RolloutStep.AVAILABLE, "films", 2, "/store/films/2"))
    workers.told()
    workers.hear(0, message=FOUND)
    assert workers.told() == []
    workers.hear(0, 1, message=RolloutMessage(RolloutStep.PREPARED, "films", 2))
    workers.told()
    workers.hear(0, message=FOUND)
    assert workers.told() == [(0, PREPARE), (1, PREPARE)]


@pytest.mark.parametrize(
    "message",
    [RolloutMessage(RolloutStep.DESIRED, "shop", 9), RolloutMessage(RolloutStep.REMOVE, "shop")],
)
def test_one_that_cannot_be_opened_is_forgotten_where_it_is_not_wanted(
    workers: Workers, message: RolloutMessage
) -> None:
    workers.hear(0, message=UNOPENED)
    workers.hear(0, message=message)
    workers.told()
    workers.start(2)
    assert UNOPENED not in [told for _, told in workers.told()]


def test_a_move_that_takes_for_ever_is_given_up(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedserve.processes.rollout_coordinator.MOVE_S_MAX", -1.0)
    workers.hear(0, message=FOUND)
    workers.hear(0, message=PREPARED)
    workers.told()
    assert workers.together.is_preparing(1)
    workers.together.check_timeouts()
    (told, other) = workers.told()
    assert told == (0, refused("shop", 8, "workers 1 have not loaded it in -1 s"))
    assert other[0] == 1
    assert not workers.together.is_preparing(1)


def test_a_name_is_loaded_and_removed_by_all(workers: Workers) -> None:
    load = RolloutMessage(RolloutStep.LOAD, "shop@canary", 9, "/store/shop/9")
    prepare, switch = (
        replace(load, step=step) for step in (RolloutStep.PREPARE, RolloutStep.SWITCH)
    )
    workers.hear(
        0, message=replace(load, step=RolloutStep.AVAILABLE)
    )  # of a name that was removed meanwhile
    workers.hear(0, message=RolloutMessage(RolloutStep.DESIRED, "shop@canary", 9))
    assert workers.told() == []
    workers.hear(1, message=load)
    assert workers.told() == [(0, prepare), (1, prepare)]
    workers.hear(0, 1, message=RolloutMessage(RolloutStep.PREPARED, "shop@canary", 9))
    assert workers.told() == [(0, replace(switch, path="")), (1, replace(switch, path=""))]
    assert workers.adopted == [("shop@canary", "/store/shop/9")]
    workers.hear(1, message=load)
    assert workers.told() == []
    remove = RolloutMessage(RolloutStep.REMOVE, "shop@canary")
    workers.hear(0, message=remove)
    assert workers.told() == [(0, remove), (1, remove)]
    assert workers.adopted[1:] == [("shop@canary", None)]
    workers.hear(0, message=remove)
    assert workers.told() == []


def test_a_worker_that_starts_meanwhile_has_what_the_others_have(workers: Workers) -> None:
    load = RolloutMessage(RolloutStep.LOAD, "shop@canary", 9, "/store/shop/9")
    workers.together.start(2)
    workers.hear(0, message=load)
    workers.hear(0, 1, message=RolloutMessage(RolloutStep.PREPARED, "shop@canary", 9))
    workers.together.start(3)
    workers.hear(0, message=RolloutMessage(RolloutStep.REMOVE, "films"))
    workers.told()
    workers.together.on_worker_ready(2)
    workers.together.on_worker_ready(3)
    remove = RolloutMessage(RolloutStep.REMOVE, "films")
    prepare = replace(load, step=RolloutStep.PREPARE)
    assert workers.told() == [(2, remove), (2, prepare), (3, remove)]


def test_the_last_name_is_not_removed(workers: Workers) -> None:
    for name in ("films", "shop"):
        workers.hear(0, message=RolloutMessage(RolloutStep.REMOVE, name))
    assert [move for _, move in workers.told()] == [RolloutMessage(RolloutStep.REMOVE, "films")] * 2


def test_what_is_removed_while_it_is_loaded_does_not_come_back(workers: Workers) -> None:
    workers.hear(0, message=FOUND)
    workers.hear(0, message=PREPARED)
    workers.hear(0, message=RolloutMessage(RolloutStep.REMOVE, "shop"))
    workers.told()
    workers.hear(1, message=PREPARED)
    assert workers.told() == []
    assert workers.adopted == [("shop", None)]


def test_shares_are_told_to_all_and_to_those_that_come(workers: Workers) -> None:
    share = RolloutMessage(RolloutStep.SHARE, "shop@canary", 3, share=10.0, shadow=5.0)
    workers.hear(0, message=share)
    assert workers.told() == [(0, share), (1, share)]
    workers.start(2)
    assert workers.told() == [(2, share)]


def test_what_was_refused_is_tried_again_where_that_is_asked(workers: Workers) -> None:
    workers.hear(0, message=FOUND)
    workers.hear(0, message=REFUSED)
    workers.told()
    retry = RolloutMessage(RolloutStep.RETRY, "shop")
    workers.hear(0, message=retry)
    assert workers.told() == [(0, retry), (1, retry)]
    workers.hear(0, message=FOUND)
    assert workers.told() == [(0, PREPARE), (1, PREPARE)]


def test_the_one_that_looks_is_told_to_look_now(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.together.reload()
    assert workers.told() == [(0, "reload")]
    nobody = Workers()
    nobody.together.reload()
    assert nobody.told() == []
    assert caplog.messages == ["the store is not looked at: no worker is ready"]
