"""Tests of files that users name: an existing one is replaced whole or stays as it is."""

import errno
import os
from pathlib import Path

import pytest

from embedserve_store.errors import StoreError
from embedserve_store.writing.small_files import write_output


def test_existing_output_stays_as_it_is_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "plan.json"
    write_output(output, b"old", may_replace=True)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError) as raised:
        write_output(output, b"new", may_replace=True)
    assert str(raised.value) == f"{output}: cannot be written: No space left on device"
    assert output.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_output_goes_through_links_and_to_devices(tmp_path: Path) -> None:
    output, link = tmp_path / "plan.json", tmp_path / "link.json"
    link.symlink_to(output)
    write_output(link, b"first", may_replace=True)
    write_output(link, b"second", may_replace=True)
    assert link.is_symlink()
    assert output.read_bytes() == b"second"
    write_output(Path(os.devnull), b"x", may_replace=True)
    assert Path(os.devnull).is_char_device()
    with pytest.raises(StoreError, match="/dev/full: cannot be written: No space"):
        write_output(Path("/dev/full"), b"x", may_replace=True)


def test_output_in_a_missing_folder_is_named(tmp_path: Path) -> None:
    output = tmp_path / "none" / "plan.json"
    with pytest.raises(StoreError, match=f"^{output}: cannot be written: No such file"):
        write_output(output, b"x", may_replace=True)


def test_new_output_replaces_neither_a_file_nor_a_link_to_none(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_bytes(b"mine")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "none")
    for name in ("d.yaml", "link.yaml"):
        with pytest.raises(FileExistsError):
            write_output(tmp_path / name, b"x", may_replace=False)
    assert (tmp_path / "d.yaml").read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["d.yaml", "link.yaml"]
    write_output(tmp_path / "new.yaml", b"x", may_replace=False)
    assert (tmp_path / "new.yaml").read_bytes() == b"x"
