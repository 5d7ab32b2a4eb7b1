"""`embedserve publish`: what it says of what it published."""

from __future__ import annotations

from pathlib import Path

import pytest
from pooled import collection
from torchrec import PoolingType

from embedserve_store import IdRule, publish
from embedserve_store.commands.publish import report


@pytest.mark.parametrize(
    ("ids", "said"),
    [(100, ["t: its vocabulary has 100 ids for 300 rows: 200 rows have no id"]), (300, [])],
)
def test_a_vocabulary_that_is_shorter_than_its_table_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ids: int,
    said: list[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    published = publish(
        collection((("t", 300, 4, ["f"], PoolingType.SUM),)),
        tmp_path,
        model="m",
        ids={"t": IdRule("map")},
        vocabularies={"t": list(range(ids))},
    )
    report(published)
    assert [
        line for line in capsys.readouterr().err.splitlines() if "its vocabulary" in line
    ] == said
