"""Tests of the ports of servers: tests that run concurrently get different ports."""

import pytest
from running_servers import PORTS, free_port, ports_of_worker


def test_no_port_is_returned_twice() -> None:
    found = [free_port() for _ in range(50)]
    assert len({*found}) == len(found)


def test_workers_of_pytest_xdist_share_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    found: list[int] = []
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        found += ports_of_worker()
    assert sorted(found) == list(range(*PORTS))
