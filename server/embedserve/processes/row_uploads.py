"""Brings the rows of new deltas to the devices that look them up, in a thread."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

from embedserve.deltas.rows_reader import RowsReader

logger = logging.getLogger(__name__)

POLL_S = 0.005
"""Interval of the check whether there is a new view, which takes microseconds."""


@contextlib.contextmanager
def uploading(readers: Sequence[RowsReader | None]) -> Iterator[None]:
    """Uploads rows within its block, for those ``readers`` whose lookups run on a device."""
    of_devices = [one for one in readers if one is not None and one.uploads_rows]
    if not of_devices:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_upload, args=(of_devices, ended), name="row-uploads")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _upload(readers: Sequence[RowsReader], ended: threading.Event) -> None:
    reasons = [""] * len(readers)
    while not ended.wait(POLL_S):
        for i, reader in enumerate(readers):
            try:
                reader.advance()
                reasons[i] = ""
            except Exception as error:  # such as torch's RuntimeError, for CUDA
                reason = str(error) or type(error).__name__
                if reason != reasons[i]:
                    reasons[i] = reason
                    logger.error("changed rows do not reach the GPU: %s", reason)
