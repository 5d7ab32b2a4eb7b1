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
    write_output(output, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError) as raised:
        write_output(output, b"new")
    assert str(raised.value) == f"{output}: cannot be written: No space left on device"
    assert output.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_output_goes_through_links_and_to_devices(tmp_path: Path) -> None:
    output, link = tmp_path / "plan.json", tmp_path / "link.json"
    link.symlink_to(output)
    write_output(link, b"first")
    write_output(link, b"second")
    assert link.is_symlink()
    assert output.read_bytes() == b"second"
    write_output(Path(os.devnull), b"x")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(StoreError, match="/dev/full: cannot be written: No space"):
        write_output(Path("/dev/full"), b"x")


def test_output_in_a_missing_folder_is_named(tmp_path: Path) -> None:
    output = tmp_path / "none" / "plan.json"
    with pytest.raises(StoreError, match=f"^{output}: cannot be written: No such file"):
        write_output(output, b"x")
