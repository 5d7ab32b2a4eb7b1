"""What nobody writes by hand is refused before it is read whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedserve_store.user_file import TEXT_BYTES_MAX, read_user_file


def test_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text("tables: [Zürich]", encoding="utf-8")
    assert read_user_file(path) == "tables: [Zürich]"


def test_a_file_larger_than_anyone_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with path.open("wb") as file:
        file.truncate(TEXT_BYTES_MAX)
    assert len(read_user_file(path)) == TEXT_BYTES_MAX
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="is it a checkpoint"):
        read_user_file(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"\x80\x02")
    with pytest.raises(ValueError, match="utf-8"):
        read_user_file(path)
