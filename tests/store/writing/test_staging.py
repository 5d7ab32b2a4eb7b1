"""Tests of staging: versions appear whole, under numbers that no two publishers share."""

import errno
import fcntl
import os
import secrets
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from server.python import environment

from embedserve_store.errors import StoreError
from embedserve_store.format.version_folder import version_numbers
from embedserve_store.writing.small_files import write_new, write_synced
from embedserve_store.writing.staging import (
    RENAME_ATTEMPTS,
    check_writable,
    publish_staged,
    staging_folder,
)


def publish(model_folder: Path) -> int:
    with staging_folder(model_folder) as folder:

        def write_number(version: int) -> None:
            write_synced(folder / "n", str(version).encode())

        return publish_staged(folder, write_number)


def test_version_numbers_count_up_from_one(tmp_path: Path) -> None:
    assert [publish(tmp_path / "store" / "m") for _ in range(3)] == [1, 2, 3]
    assert os.listdir(tmp_path / "store" / "m" / "3") == ["n"]


def test_next_version_follows_highest_and_ignores_other_names(tmp_path: Path) -> None:
    for name in ("7", "0", "-1", "08", "9x", ".staging-1", "latest", "٣"):
        (tmp_path / name).mkdir()
    assert version_numbers(tmp_path) == [7]
    assert publish(tmp_path) == 8


def test_file_named_like_a_version_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("mine")
    assert publish(tmp_path) == 2
    assert (tmp_path / "1").read_text() == "mine"


def publish_second(model_folder: Path, losses: int) -> int:
    """Publishes while other publishers take its next number, ``losses`` times."""
    left = iter(range(losses))
    with staging_folder(model_folder) as folder:

        def write_number(version: int) -> None:
            write_synced(folder / "n", str(version).encode())
            if next(left, None) is not None:
                (model_folder / str(version)).mkdir()
                (model_folder / str(version) / "n").write_text("other")

        return publish_staged(folder, write_number)


def test_version_number_taken_concurrently_is_skipped(tmp_path: Path) -> None:
    assert publish_second(tmp_path, 1) == 2
    assert (tmp_path / "1" / "n").read_text() == "other"
    assert (tmp_path / "2" / "n").read_text() == "2"


def test_publisher_gives_up_after_100_lost_races(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="took the version number 100 times"):
        publish_second(tmp_path, RENAME_ATTEMPTS)
    assert version_numbers(tmp_path) == list(range(1, 101))
    assert len(os.listdir(tmp_path)) == 100


def test_publisher_succeeds_after_99_lost_races(tmp_path: Path) -> None:
    assert publish_second(tmp_path, RENAME_ATTEMPTS - 1) == 100


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o444), (0o002, 0o444), (0o027, 0o440)])
def test_published_files_are_read_only_and_their_folder_is_writable(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        publish(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "1" / "n").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "1").stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_publishing_works_where_chmod_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=OSError(code, os.strerror(code))))
    assert [publish(tmp_path) for _ in range(2)] == [1, 2]
    assert (tmp_path / "2" / "n").read_text() == "2"


def test_publishing_works_where_folders_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", reject_folders)
    assert [publish(tmp_path / "m") for _ in range(2)] == [1, 2]
    assert write_new(tmp_path / "m" / "notes" / "1.json", b"{}")


def test_publish_fails_on_chmod_io_error_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        publish(tmp_path / "m")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failing", ["open", "fsync"])
def test_version_that_cannot_be_flushed_after_its_rename_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    call = getattr(os, failing)

    def fail_once_renamed(*args: Any, **options: Any) -> Any:
        if (tmp_path / "m" / "1").exists():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return call(*args, **options)

    monkeypatch.setattr(os, failing, fail_once_renamed)
    with pytest.raises(OSError, match="Too many open files"):
        publish(tmp_path / "m")
    assert not list(tmp_path.glob("m/[0-9]*"))


def fail(model_folder: Path) -> None:
    with staging_folder(model_folder) as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt


def test_failed_first_publish_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "m")
    assert os.listdir(tmp_path) == []


def test_failed_publish_keeps_existing_versions(tmp_path: Path) -> None:
    publish(tmp_path / "m")
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "m")
    assert os.listdir(tmp_path / "m") == ["1"]


def test_publish_recreates_model_folder_removed_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["lost", "kept"])

    def name_after_the_other_failed(nbytes: int) -> str:
        name = next(names)
        if name == "lost":
            (tmp_path / "m").rmdir()
        return name

    monkeypatch.setattr(secrets, "token_hex", name_after_the_other_failed)
    assert publish(tmp_path / "m") == 1


def test_staging_folders_of_killed_publishers_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".staging-1").mkdir()
    (tmp_path / ".staging-1" / "half").write_text("half")
    (tmp_path / ".staging-1" / "half").chmod(0o444)
    (tmp_path / ".staging-1.lock").write_text("")
    (tmp_path / ".staging-2").mkdir()  # has no lock file
    (tmp_path / ".staging-3.lock").write_text("")
    (tmp_path / ".other").mkdir()
    with staging_folder(tmp_path) as folder:
        ours = {folder.name, f"{folder.name}.lock"}
        assert set(os.listdir(tmp_path)) == {".other"} | ours
    assert os.listdir(tmp_path) == [".other"]


@pytest.mark.parametrize("name", [".staging-1.lock", ".copy-1.lock"])
def test_lock_file_without_a_folder_is_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    publish(tmp_path)
    assert os.listdir(tmp_path) == ["1"]


def test_staging_folder_in_use_is_not_removed(tmp_path: Path) -> None:
    with staging_folder(tmp_path) as folder:
        (folder / "half").write_text("half")
        assert publish(tmp_path) == 1
        with pytest.raises(KeyboardInterrupt):
            fail(tmp_path)
        assert (folder / "half").read_text() == "half"
        assert publish_staged(folder, lambda version: None) == 2
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_lock_file_removed_concurrently_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    stolen: list[str] = []

    def steal_first(lock: int, operation: int) -> None:
        if not stolen:
            (name,) = os.listdir(tmp_path)
            (tmp_path / name).unlink()
            stolen.append(name)
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", steal_first)
    with staging_folder(tmp_path) as folder:
        assert f"{folder.name}.lock" in os.listdir(tmp_path)
        assert [f"{folder.name}.lock"] != stolen


def test_publishing_without_flock_support_keeps_staging_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    with staging_folder(tmp_path) as folder:
        assert publish(tmp_path) == 1
        assert folder.is_dir()


@pytest.mark.parametrize("name", ["file", "file/a/b"])
def test_check_writable_rejects_a_file_in_the_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=f"{name}: cannot be written: .*/file is not a folder"):
        check_writable(tmp_path / name)


def test_check_writable_accepts_folders_that_do_not_exist_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    check_writable(Path("a"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["~", "~/store/model", "~user/store"])
def test_check_writable_rejects_a_tilde_that_no_shell_has_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=f"^{name}: only a shell replaces ~ by a home folder"):
        check_writable(Path(name))
    (tmp_path / name.partition("/")[0]).mkdir()
    check_writable(Path(name))


def test_check_writable_rejects_a_folder_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(StoreError, match=f"a: .*no permission to write to {tmp_path}$"):
        check_writable(tmp_path / "a")


def test_check_writable_rejects_a_read_only_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = list(os.statvfs(tmp_path))
    flags[8] |= os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(flags))
    with pytest.raises(StoreError, match=f"a: .*{tmp_path} is on a read-only file system$"):
        check_writable(tmp_path / "a")


RACER = """
import sys
from contextlib import suppress
from pathlib import Path
from embedserve_store.writing.small_files import write_new, write_synced
from embedserve_store.writing.staging import publish_staged, staging_folder

print("ready", flush=True)
sys.stdin.readline()
model_folder = Path(sys.argv[1])
for _ in range(20):
    with suppress(KeyError), staging_folder(model_folder):
        raise KeyError
for _ in range(20):
    with staging_folder(model_folder) as folder:
        (folder / "pid").write_text(sys.argv[2])
        print(publish_staged(folder, lambda n: write_synced(folder / "n", str(n).encode())))
"""


def test_concurrent_publishers_never_share_a_version_number(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(folder), str(i)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        racer.stdout.readline()
    published: dict[str, int] = {}
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for i, racer in enumerate(racers):
        output, _ = racer.communicate(timeout=300)
        assert racer.returncode == 0
        published |= dict.fromkeys(output.split(), i)
    assert sorted(map(int, published)) == list(range(1, 61))
    for name, i in published.items():
        assert (folder / name / "n").read_text() == name
        assert (folder / name / "pid").read_text() == str(i)
    assert sorted(os.listdir(folder)) == sorted(published)
