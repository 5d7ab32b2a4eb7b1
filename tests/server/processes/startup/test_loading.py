"""Tests of the versions that a shard starts with. A process that will fork has a child pull its
versions, and reports the child's errors."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server.python import run_warm_python
from server.small_store import publish_small_model

from embedserve.config import ServeSettings
from embedserve.processes.startup import loading
from embedserve.processes.startup.loading import open_versions
from embedserve_store import ModelStore, StoreError
from embedserve_store.errors import NoSuchPartError, UnreachableError

LOAD_WITHOUT_MEMORY = """
import resource, sys
from embedserve.config import ServeSettings
from embedserve.processes.model_loading import make_resident_and_verify
from embedserve.processes.startup.loading import open_versions
from embedserve_store import StoreError
settings = ServeSettings(sys.argv[1], tables="resident")
versions = open_versions(settings)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (3 << 20)  # two huge pages are more
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    make_resident_and_verify(settings, versions, is_shown=False)
except StoreError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a store with version 1 in two parts, and versions 2 and 3 without parts."""
    folder = tmp_path_factory.mktemp("parts")
    publish_small_model(folder, "--hosts", "2")
    publish_small_model(folder)
    return publish_small_model(folder)


def test_shard_starts_with_older_versions_if_newer_versions_have_no_parts(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    versions = open_versions(ServeSettings(str(store), model=("shop",), part="0/2"))
    assert list(versions) == ["shop@1"]
    assert [record.message.partition(" is not held: ")[0] for record in caplog.records] == [
        "shop version 3",
        "shop version 2",
    ]


def test_shard_does_not_start_without_a_version_for_its_part(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoSuchPartError, match=r"shop/3: was published without --hosts"):
        open_versions(ServeSettings(str(store), model=("shop",), part="0/3"))
    assert caplog.records == []


def test_model_that_is_named_twice_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^model is a, b@1, a: one is named twice$"):
        open_versions(ServeSettings("nowhere", model=("a", "b@1", "a")))


def test_lack_of_memory_for_resident_tables_is_reported(store: Path) -> None:
    done = run_warm_python("-c", LOAD_WITHOUT_MEMORY, store)
    what = "copying the tables of shop version 3 into memory"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{what}: no memory is left\n", "")


@pytest.mark.parametrize(
    ("errors", "loaded"),
    [
        ({}, [9, 8]),
        ({9: StoreError("damaged")}, [8]),  # it counts, as it may be repaired
        ({8: UnreachableError("away")}, [9]),
        ({9: NoSuchPartError(), 8: NoSuchPartError(), 7: StoreError("damaged")}, [6]),
        ({9: UnreachableError("away")}, [8]),  # polls load it later
        (dict.fromkeys(range(5, 10), UnreachableError("away")), None),
    ],
)
def test_unloadable_versions_are_skipped_at_the_start(
    monkeypatch: pytest.MonkeyPatch, errors: dict[int, StoreError], loaded: list[int] | None
) -> None:
    reads = []

    def load(self: ModelStore, model: str, number: int) -> Any:
        reads.append(number)
        if number in errors:
            raise errors[number]
        return object()

    monkeypatch.setattr(ModelStore, "models", lambda self: ["shop"])
    monkeypatch.setattr(ModelStore, "versions", lambda self, model: [5, 6, 7, 8, 9])
    monkeypatch.setattr(ModelStore, "aliases", lambda self, model: {})
    monkeypatch.setattr(ModelStore, "load", load)
    settings = ServeSettings("nowhere", model=("shop",), part="0/2")
    if loaded is None:
        with pytest.raises(UnreachableError):
            open_versions(settings)
        return
    assert list(open_versions(settings)) == [f"shop@{number}" for number in loaded]
    assert len(reads) == len(set(reads)) == len(errors) + len(loaded)


PULLED = """
import sys

from embedserve.config import ServeSettings
from embedserve.processes.startup.loading import open_versions_to_fork

store = sys.argv[1]
settings = ServeSettings(f"file://{store}", model=sys.argv[2:3])
try:
    print(open_versions_to_fork(settings))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("path", "model", "kind"),
    [
        ("", "shop@", "ValueError model is 'shop@': expected NAME"),
        ("", "shop", "StoreError "),
        ("/dev/null/store", "shop", "UnreachableError "),
    ],
)
def test_error_of_the_pulling_process_keeps_its_type(
    tmp_path: Path, path: str, model: str, kind: str
) -> None:
    """Checks that an invalid setting fails immediately, while a missing version may be waited for,
    and that a store that cannot be reached has its own exit status."""
    done = run_warm_python("-c", PULLED, str(tmp_path / path), model)
    assert done.stdout.startswith(kind)
    assert done.stderr == ""


FORK = """
import os
import signal
import sys

from embedserve.config import ServeSettings
from embedserve.processes.sigterm import Terminated, sigterm_interrupts
from embedserve.processes.startup import loading

parent, what = os.getpid(), sys.argv[1]

def pull(settings):
    if what == "no memory":
        raise MemoryError("3 GB")
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(parent, signal.SIGTERM)
    while True:
        signal.pause()

loading.open_versions = pull
try:
    with sigterm_interrupts():
        loading.open_versions_to_fork(ServeSettings("file:///nowhere"))
except (Terminated, Exception) as error:
    print(type(error).__name__, error)
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no process is left")
"""


ENDED = "StoreError file:///nowhere: the process that pulls it"


@pytest.mark.parametrize(
    ("what", "how", "shown"),
    [
        ("stopped", "Terminated ", ""),
        ("no memory", f"{ENDED} ended with exit code 1", "MemoryError: 3 GB"),
        ("killed", f"{ENDED} was ended by SIGKILL", ""),
    ],
)
def test_pulling_process_ends_and_its_end_is_reported(what: str, how: str, shown: str) -> None:
    """Covers SIGTERM to the parent alone, after which the child must not keep the ports and pull
    on."""
    done = run_warm_python("-c", FORK, what)
    first, last = done.stdout.splitlines()
    assert first.startswith(how)
    assert last == "no process is left"
    assert shown in done.stderr


@pytest.mark.parametrize("default", ["m", "m@3"])
def test_start_waits_for_unpublished_default_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, default: str
) -> None:
    """Covers a start without --model, when the store has another model already."""
    published = [["n"], ["m", "n"]]

    @contextmanager
    def opened(*_: object) -> Iterator[SimpleNamespace]:
        def load(model: str, tag: str | None) -> SimpleNamespace:
            return SimpleNamespace(manifest=SimpleNamespace(tables=[]))

        yield SimpleNamespace(models=lambda: published.pop(0), load=load)

    monkeypatch.setattr(loading, "opened", opened)
    monkeypatch.setattr(loading, "LOCAL_POLL_S", 0.0)
    settings = ServeSettings("store", default_model=default, wait=True)
    if default == "m":
        assert list(loading.opened_in_time(settings, loading.open_versions)) == ["m", "n"]
    else:  # a version that is not served beside the newest
        with pytest.raises(ValueError, match="default_model is 'm@3', but what is served is m, n"):
            loading.opened_in_time(settings, loading.open_versions)
    assert caplog.messages == [
        "waiting for what is to be served: store: there is no model 'm'; models are n"
    ]
