"""Remembers in the cache which version was damaged when it was pulled.

Servers poll every few seconds. Without a record each poll would pull all bytes of the version again
to find the same damage. The version is pulled again once the store lists other files, or after a
delay that doubles. Never imports torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from embedserve_store.errors import NoRoomError, StoreError, UnreachableError

UNDAMAGED = (UnreachableError, NoRoomError)
"""Errors of a pull after which nothing is known to be wrong with the version."""
DELAY_S_MIN = 60.0
DELAY_S_MAX = 3600.0
"""Seconds until a damaged version is pulled again, the first time and at most. The bytes may have
been damaged on the way."""


@dataclass(frozen=True)
class _Damage:
    listed: str
    """Checksum of the store's listing of the version."""
    problem: str
    delay_s: float
    next_s: float
    """When the version is pulled again, in seconds since the Unix epoch."""


@contextmanager
def known_damage(path: Path, listed: str) -> Iterator[None]:
    """Runs a pull, and records at ``path`` that it found damage.

    Args:
        listed: checksum of the store's listing of the version.

    Raises:
        StoreError: the version is damaged, or was at the last pull of these files, not long ago.
    """
    before = _read(path)
    delay_s = DELAY_S_MIN
    if before is not None and before.listed == listed:
        if 0 < before.next_s - time.time() <= DELAY_S_MAX:
            raise StoreError(before.problem)
        delay_s = min(2 * before.delay_s, DELAY_S_MAX)
    try:
        yield
    except UNDAMAGED:
        raise
    except StoreError as error:
        # This host could not read what arrived, for example without a file descriptor left.
        if isinstance(error.__cause__, OSError):
            raise
        next_s = time.time() + delay_s
        when = datetime.fromtimestamp(next_s, UTC).isoformat(timespec="seconds")
        problem = (
            f"{error}; it is pulled again after a repair, at {when}, or once {path} is removed"
        )
        with suppress(OSError):
            path.write_text(json.dumps(asdict(_Damage(listed, problem, delay_s, next_s))))
        raise StoreError(problem) from error
    path.unlink(missing_ok=True)


def _read(path: Path) -> _Damage | None:
    """Returns the record at ``path``; None if there is none, or a killed process left a half."""
    try:
        return _Damage(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
