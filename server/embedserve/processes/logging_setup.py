"""Sets up the logging of a server's processes: their lines go to stderr, formatted by
log_lines.py."""

from __future__ import annotations

import faulthandler
import logging
from typing import TextIO

from embedserve.metrics.log_stream import LogHandler, unblock_output
from embedserve.metrics.rate_limited_logger import RateLimitedTracebacks
from embedserve.processes.log_lines import JsonLines, TextLines
from embedserve_store.terminal.console import hush_torch


def set_up_logging(level: str, log_format: str = "text") -> None:
    """Sets up the logging of this process and of the processes that it forks; ``log_format`` is
    text or json."""
    unblock_output()
    faulthandler.enable()  # writes the stacks of a process that a signal such as SIGBUS ends
    # torchrec and FBGEMM log at length how they were built; only their warnings are shown.
    logging.basicConfig(level=logging.WARNING, handlers=[log_handler(log_format)])
    for ours in ("embedserve", "embedserve_store"):
        logging.getLogger(ours).setLevel(level.upper())
    hush_torch()


def log_handler(log_format: str, stream: TextIO | None = None) -> logging.Handler:
    """Returns the handler of all log lines, which writes to ``stream`` or stderr; ``log_format`` is
    text or json."""
    handler = LogHandler(stream)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    handler.addFilter(RateLimitedTracebacks())
    return handler
