"""Forked processes that end without tearing down what they inherited.

Tearing it down takes longer than most of them run.
"""

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class QuickExit:
    """Ends this process, and those that it forks, after its other atexit functions. Made before
    modules are imported that register some, as atexit calls the first one last."""

    def __init__(self) -> None:
        self._status = 0
        atexit.register(self._exit)

    def _exit(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)

    @contextmanager
    def status_of_block(self) -> Iterator[None]:
        """Makes the process end with the status with which the code in the block ends."""
        try:
            yield
        except SystemExit as error:
            self._status = (
                error.code if isinstance(error.code, int) else int(error.code is not None)
            )
            raise
        except KeyboardInterrupt:
            atexit.unregister(self._exit)  # Python exits by the signal
            raise
        except BaseException:
            self._status = 1
            raise


def keep_for_forks() -> None:
    """Keeps the garbage collector and finalizers from what was imported, in all forks.

    torch unregisters each of its operators at the exit of a process, which takes 40 ms and copies a
    tenth of the memory.
    """
    registry: Any = weakref.finalize
    for finalizer in registry._registry:
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
