"""Waits of tests without an event loop; `server.waiting` has those with one."""

import time
from collections.abc import Callable

WAIT_S_MAX = 300.0
PAUSE_S = 0.05


def wait_until(
    is_true: Callable[[], object],
    state: Callable[[], object] = str,
    seconds: float = WAIT_S_MAX,
) -> None:
    """Returns when ``is_true`` does; after ``seconds`` it fails and shows ``state``."""
    end_s = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end_s, state()
        time.sleep(PAUSE_S)
