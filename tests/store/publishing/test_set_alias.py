"""Tests of aliases: they are set, removed and restored, in a folder and on S3, by one writer and by
many."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from server.python import run_warm_python
from store.listing import everything_under
from store.one_table import publish_versions

from embedserve_store import DeltaWriter, compact_deltas
from embedserve_store.copying.copy_versions import copy_versions
from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import manifest_name
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.remove_versions import remove_version
from embedserve_store.publishing.set_alias import roll_back, set_alias
from embedserve_store.writing import small_files

KILLED_TIMEOUT_S = 900


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Returns a store with versions 1 and 2 of "m"."""
    publish_versions(tmp_path / "store", 2)
    return tmp_path / "store"


def test_alias_resolves_to_its_latest_version(store: Path) -> None:
    models = ModelStore(store)
    assert (models.aliases("m"), models.alias_history("m", "stable")) == ({}, [])
    first = set_alias(store, "m", "stable", 1, why="the first")
    assert (first.change_number, first.version, first.why) == (1, 1, "the first")
    assert "@" in first.who
    second = set_alias(str(store), "m", "stable", 2, who="kim")
    set_alias(store, "m", "canary", "stable")
    assert models.aliases("m").keys() == {"canary", "stable"}
    assert models.aliases("m")["canary"].version == 2
    assert models.alias_history("m", "stable") == [second, first]
    assert models.load("m", "stable").manifest.version == 2
    assert models.manifest("m", "canary").version == 2
    assert models.load("m", "1").manifest.version == 1
    assert (models.versions("m"), models.models()) == ([1, 2], ["m"])


def test_alias_set_during_a_copy_is_left_out_with_its_former_version(
    store: Path, tmp_path: Path
) -> None:
    set_alias(store, "m", "old", 1)
    set_alias(store, "m", "stable", 2)

    def move(file: str, bytes_done: int, bytes_total: int) -> None:
        if ModelStore(store).alias("m", "stable").version == 2:
            set_alias(store, "m", "stable", 1)

    copied = copy_versions(store, tmp_path / "t", "m", "old", aliases=True, progress=move)
    assert (copied.copied, copied.aliases, copied.left_out) == ([1], ["old"], ["stable"])
    assert list(ModelStore(tmp_path / "t").aliases("m")) == ["old"]
    again = copy_versions(store, tmp_path / "t", "m", "old", aliases=True)
    assert (again.aliases, again.left_out) == (["old", "stable"], [])
    assert ModelStore(tmp_path / "t").aliases("m") == ModelStore(store).aliases("m")


@pytest.fixture
def with_deltas(store: Path) -> Path:
    """Returns the store with deltas 1 to 3 of version 1; version 3 has the rows of the first
    two."""
    with closing(DeltaWriter(store, model="m", version=1)) as writer:
        for seq in (1, 2, 3):
            writer.push_rows({"t": ([seq], torch.zeros(1, 4))})
    compact_deltas(store, "m", version=1, seq=2)
    return store


def test_alias_can_pin_a_delta(with_deltas: Path) -> None:
    models = ModelStore(with_deltas)
    set_alias(with_deltas, "m", "stable", 1, at_seq=2, why="the last good one")
    assert (models.alias("m", "stable").version, models.alias("m", "stable").at_seq) == (1, 2)
    assert models.load("m", "stable").at_seq == 2
    assert models.load("m", 1).at_seq is None
    (event,) = models.history("m", last=1)
    assert event.detail == "stable at delta 2: the last good one"
    set_alias(with_deltas, "m", "stable", 3, at_seq=2)  # at its own rows
    set_alias(with_deltas, "m", "stable", 3)
    assert models.load("m", "stable").at_seq is None
    roll_back(with_deltas, "m")  # as before the last change
    assert (models.alias("m", "stable").version, models.alias("m", "stable").at_seq) == (1, 2)
    set_alias(with_deltas, "m", "stable", 1, at_seq=0)  # before the first delta
    assert models.alias("m", "stable").at_seq == 0


@pytest.mark.parametrize(
    ("version", "at_seq", "reason"),
    [
        (1, 4, r"store/m: at_seq is 4, and line 1 has no such delta \(embedserve deltas\)$"),
        (1, -1, "m: at_seq is -1, expected 0 to 4294967295: version 1 has the deltas up to 0 in "),
        (3, 1, "m: at_seq is 1, expected 2 to 4294967295: version 3 has the deltas up to 2 in "),
        (1, 2**32, "store/m: at_seq is 4294967296, expected 0 to 4294967295: version 1 has "),
        (2, 1, r"store/m: at_seq is 1, and line 2 has no such delta \(embedserve deltas\)$"),
        (None, 1, "at_seq is 1: an alias that is removed has no delta$"),
    ],
)
def test_alias_of_an_invalid_delta_is_rejected_without_change(
    with_deltas: Path, version: int | None, at_seq: int, reason: str
) -> None:
    before = set_alias(with_deltas, "m", "stable", 1)
    with pytest.raises(StoreError, match=reason):
        set_alias(with_deltas, "m", "stable", version, at_seq=at_seq)
    assert ModelStore(with_deltas).alias("m", "stable") == before


def test_rollback_restores_the_pinned_delta_of_the_version(with_deltas: Path) -> None:
    models = ModelStore(with_deltas)
    set_alias(with_deltas, "m", "stable", 1, at_seq=2)
    set_alias(with_deltas, "m", "stable", 2)
    set_alias(with_deltas, "m", "canary", 1, share=10)  # at delta 3, which is bad
    done = roll_back(with_deltas, "m", to=1)
    assert (done.after.version, done.after.at_seq) == (1, 2)
    assert [one.name for one in done.removed] == ["canary"]
    set_alias(with_deltas, "m", "old", 1, at_seq=1)
    set_alias(with_deltas, "m", "newest", 1)
    assert roll_back(with_deltas, "m", to="newest").after.at_seq is None  # like that alias
    assert roll_back(with_deltas, "m", to="old").after.at_seq == 1
    (with_deltas / "m/deltas/1" / manifest_name(1)).unlink()
    set_alias(with_deltas, "m", "stable", 2)
    set_alias(with_deltas, "m", "canary", 1, share=10)
    with pytest.raises(StoreError, match="at_seq is 1, and line 1 has no such delta"):
        roll_back(with_deltas, "m")
    assert "canary" in models.aliases("m")


def test_alias_set_from_an_alias_copies_its_delta(with_deltas: Path) -> None:
    set_alias(with_deltas, "m", "canary", 1, at_seq=2)
    assert set_alias(with_deltas, "m", "stable", "canary").at_seq == 2
    assert set_alias(with_deltas, "m", "stable", "canary", at_seq=1).at_seq == 1
    made = compact_deltas(with_deltas, "m", version="stable")
    assert made.manifest.source["line_seq"] == 1


@pytest.mark.parametrize("at_seq", [-1, 2**32, 2**70, "2", True, 1.5])
def test_invalid_at_seq_in_an_alias_file_is_rejected(store: Path, at_seq: object) -> None:
    path = store / "m/aliases/stable/1.json"
    set_alias(store, "m", "stable", 1)
    data = json.loads(path.read_bytes()) | {"at_seq": at_seq}
    path.unlink()
    path.write_bytes(sealed_json(data))
    with pytest.raises(StoreError, match=r"stable/1.json: at_seq is "):
        ModelStore(store).alias("m", "stable")


def test_removed_alias_is_unset_and_keeps_its_history(store: Path) -> None:
    set_alias(store, "m", "stable", 1)
    set_alias(store, "m", "stable", None, why="over")
    models = ModelStore(store)
    assert models.aliases("m") == {}
    assert [one.version for one in models.alias_history("m", "stable")] == [None, 1]
    none = "is no version and no alias, aliases are none; versions are 1, 2$"
    with pytest.raises(StoreError, match=rf"store/m: 'stable' {none}"):
        models.load("m", "stable")
    with pytest.raises(StoreError, match=f"'stble' {none}"):
        models.load("m", "stble")
    with pytest.raises(StoreError, match="store/m: no alias 'stable' to remove"):
        set_alias(store, "m", "stable", None)
    assert set_alias(store, "m", "stable", 2).change_number == 3


def test_invalid_set_alias_arguments_leave_the_store_unchanged(store: Path) -> None:
    before = everything_under(store)
    for model, name, version, message in (
        ("m", "stable", 3, r"m: version 3 does not exist; versions are 1, 2"),
        ("m", "stable", "canary", "'canary' is no version and no alias, aliases are none"),
        ("m", "stable", "0", "'0' is no version and no alias"),
        ("m", "7", 1, "alias name '7'"),
        ("m", "../x", 1, "alias name '../x'"),
        ("other", "stable", 1, "there is no model 'other'; models are "),
        ("../m", "stable", 1, r"'\.\./m' is not the name of a model"),
    ):
        with pytest.raises(StoreError, match=message):
            set_alias(store, model, name, version)
    for option in ("why", "who"):
        texts = {"why": "", "who": "", option: "x" * 1001}
        with pytest.raises(StoreError, match=f"{option} has 1001 characters, the limit is 1000"):
            set_alias(store, "m", "stable", 1, why=texts["why"], who=texts["who"])
    for share in (-1.0, 100.5, float("nan")):
        with pytest.raises(StoreError, match=f"share is {share:g}, expected a percentage from 0"):
            set_alias(store, "m", "stable", 1, share=share)
    assert everything_under(store) == before


@pytest.mark.parametrize("share", [0.0, 100.0])
def test_alias_may_have_no_share_or_all(store: Path, share: float) -> None:
    set_alias(store, "m", "canary", 1, share=share, shadow=share)
    alias = ModelStore(store).alias("m", "canary")
    assert (alias.share, alias.shadow) == (share, share)


def test_other_files_in_the_alias_folder_are_ignored(store: Path) -> None:
    set_alias(store, "m", "stable", 1)
    folder = store / "m" / "aliases"
    (folder / "stable" / ".new-0123").write_text("{")
    (folder / "stable" / "2.json.swp").write_text("{")
    (folder / "README").write_text("")
    (folder / "empty").mkdir()
    assert list(ModelStore(store).aliases("m")) == ["stable"]
    assert set_alias(store, "m", "stable", 2).change_number == 2


def test_damaged_alias_is_rejected_with_its_file_name(store: Path) -> None:
    set_alias(store, "m", "stable", 1)
    path = store / "m" / "aliases" / "stable" / "1.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(StoreError, match=r"m/aliases/stable/1\.json: sha256 is .* changed since"):
        ModelStore(store).load("m", "stable")
    assert ModelStore(store).load("m", 1).manifest.version == 1


def test_damaged_alias_does_not_affect_other_aliases(store: Path) -> None:
    set_alias(store, "m", "stable", 1)
    set_alias(store, "m", "canary", 2)
    (store / "m" / "aliases" / "canary" / "2.json").touch()
    models = ModelStore(store)
    assert models.manifest("m", "stable").version == 1
    for act in (lambda: models.load("m", "canary"), lambda: models.aliases("m")):
        with pytest.raises(StoreError, match=r"canary/2\.json: not JSON, or half-written"):
            act()
    assert set_alias(store, "m", "canary", 1).change_number == 3
    assert models.manifest("m", "canary").version == 1


def test_set_alias_reports_a_concurrently_removed_version(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def removed_first(*paths: str) -> None:
        remove_version(store, "m", 1)
        link(*paths)

    monkeypatch.setattr(os, "link", removed_first)
    with pytest.raises(StoreError, match=r"m: version 1 was removed meanwhile, and alias 'stable'"):
        set_alias(store, "m", "stable", 1)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_concurrent_set_alias_calls_all_succeed(store: Path, scheme: str) -> None:
    where = f"{scheme}{store}"
    with ThreadPoolExecutor(8) as pool:
        moved = [pool.submit(set_alias, where, "m", "stable", 1 + i % 2) for i in range(24)]
        numbers = sorted(one.result().change_number for one in moved)
    assert numbers == list(range(1, 25))
    history = ModelStore(store).alias_history("m", "stable")
    assert [one.change_number for one in history] == list(range(24, 0, -1))
    names = os.listdir(store / "m" / "aliases" / "stable")
    assert [name for name in names if name.startswith(".")] == []


def test_set_alias_works_without_hard_links(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Not permitted")))
    assert [set_alias(store, "m", "stable", version).change_number for version in (1, 2)] == [1, 2]
    assert not small_files.write_new(store / "m/aliases/stable/1.json", b"another writer's")
    assert [one.version for one in ModelStore(store).alias_history("m", "stable")] == [2, 1]


def test_set_alias_on_a_read_only_store_fails(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr(os, "link", Mock(side_effect=error))
    with pytest.raises(StoreError, match=r"stable/1\.json: cannot be written: Read-only file sys"):
        set_alias(store, "m", "stable", 1)
    assert ModelStore(store).aliases("m") == {}


def test_store_is_consistent_when_publish_or_set_alias_is_killed(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_at_each_step.py")
    done = run_warm_python(script, tmp_path, timeout_s=KILLED_TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = dict(line.split() for line in done.stdout.splitlines())
    assert int(steps["publish"]) > 20
    assert int(steps["alias"]) > 5


def test_rollback_restores_previous_version_and_removes_traffic_aliases(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_versions(store, 4)
    for version in (1, 2, 3, 4):
        set_alias(store, "m", "stable", version)
    set_alias(store, "m", "canary", 4, share=10.0)
    set_alias(store, "m", "dark", 2, shadow=5.0)
    set_alias(store, "m", "good", 3, share=1.0)  # names the version that the rollback returns to
    set_alias(store, "m", "named", 4)  # serves only requests that name it
    done = roll_back(store, "m", why="CTR fell", who="kim")
    assert (done.before.version, done.after.version) == (4, 3)
    assert {one.name: one.version for one in done.removed} == {"canary": 4, "dark": 2}
    models = ModelStore(store)
    now = {name: one.version for name, one in models.aliases("m").items()}
    assert now == {"good": 3, "named": 4, "stable": 3}
    for name in ("stable", "canary", "dark"):
        last = models.alias_history("m", name)[0]
        assert (last.why, last.who) == ("CTR fell", "kim")
    # Each rollback goes further back, and never forward to the bad version.
    assert roll_back(store, "m").after.version == 2
    assert roll_back(store, "m").after.version == 1
    with pytest.raises(
        StoreError, match=r"stable was no other version than 1 before: say which \(--to\)"
    ):
        roll_back(store, "m")
    assert roll_back(store, "m", to="named").after.version == 4


def test_impossible_rollback_leaves_the_store_unchanged(store: Path) -> None:
    set_alias(store, "m", "stable", 1)
    set_alias(store, "m", "stable", 2)
    set_alias(store, "m", "canary", 2, share=10.0)
    remove_version(store, "m", 1)
    before = everything_under(store)
    expected_error = "stable was version 1 before, which does not exist any more; versions are 2$"
    with pytest.raises(StoreError, match=expected_error):
        roll_back(store, "m")
    with pytest.raises(StoreError, match="no alias 'stble', aliases are canary, stable"):
        roll_back(store, "m", "stble")
    with pytest.raises(StoreError, match="version 9 does not exist"):
        roll_back(store, "m", to=9)
    assert everything_under(store) == before


def test_rollback_that_fails_midway_can_be_retried(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):
        set_alias(store, "m", "stable", version)
    set_alias(store, "m", "canary", 2, share=10.0)

    sync = small_files.sync

    def fail_to_sync_folder(path: Path) -> None:
        if path.is_dir():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    with monkeypatch.context() as patched:
        patched.setattr(small_files, "sync", fail_to_sync_folder)
        with pytest.raises(StoreError, match="cannot be written"):
            roll_back(store, "m")
    done = roll_back(store, "m")
    assert done.after.version == 1
    assert ModelStore(store).aliases("m").keys() == {"stable"}


@pytest.mark.parametrize("moved", ["stable", "canary"])
def test_temporary_files_of_killed_writers_are_removed(store: Path, moved: str) -> None:
    """Removes an hour-old file whichever alias changes next. A new file stays, because its writer
    may still link it."""
    set_alias(store, "m", "stable", 1)
    old, new = (store / "m" / "aliases" / "stable" / f".new-{name}" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    set_alias(store, "m", moved, 2)
    assert (old.exists(), new.exists()) == (False, True)
