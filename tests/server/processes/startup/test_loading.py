"""A process that will fork has another one pull its versions, and learns why it cannot."""

from __future__ import annotations

import pytest
from server.python import run_python

PULLED = """
import sys

from embedserve.config import ServeSettings
from embedserve.processes.startup.loading import open_versions_to_fork

store = sys.argv[1]
settings = ServeSettings(f"file://{store}", model=sys.argv[2:3], default_model=sys.argv[3])
try:
    print(open_versions_to_fork(settings))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("model", "default", "kind"),
    [
        ("shop@", "", "ValueError model is 'shop@': expected NAME"),
        ("shop", "", "StoreError "),
    ],
)
def test_an_error_of_the_process_that_pulls_keeps_its_kind(
    tmp_path: object, model: str, default: str, kind: str
) -> None:
    """A setting that is wrong is not waited for, as a version that is missing may be."""
    done = run_python("-c", PULLED, str(tmp_path), model, default)
    assert done.stdout.startswith(kind)
    assert done.stderr == ""
