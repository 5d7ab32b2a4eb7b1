"""Tests of `embedserve delete`: it removes one version, or prints one line with the reason why
not."""

from __future__ import annotations

from pathlib import Path

import torch
from typer.testing import CliRunner

from embedserve.commands.cli import app
from embedserve_store import ModelStore, TableSpec, publish, set_alias

TABLES = [TableSpec("t", 10, 4, ("t",), "sum", "float32")]


def test_delete_removes_a_version_and_rejects_needed_versions(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        rows = torch.full((10, 4), float(number))
        publish({"embedding_bags.t.weight": rows}, tmp_path, model="m", tables=TABLES)
    set_alias(tmp_path, "m", "stable", 1)

    def delete(model: str, version: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["delete", str(tmp_path), model, version])
        return done.exit_code, done.stderr

    assert delete("m", "2") == (0, "m: removed version 2\n")
    for model, version, reason in (
        ("m", "1", "version 1 is what alias stable names"),
        ("m", "2", "version 2 does not exist; versions are 1, 3"),
        ("m", "3", "version 3 is the newest, which stays"),
        ("n", "1", "there is no model 'n'"),
    ):
        status, stderr = delete(model, version)
        assert (status, reason in stderr, len(stderr.splitlines())) == (1, True, 1), stderr
    assert ModelStore(tmp_path).versions("m") == [1, 3]
