"""Tests of `embedserve delete`: it removes one version, or prints one line with the reason why
not."""

from pathlib import Path

from store.commands.conftest import error_of, run
from store.one_table import publish_versions

from embedserve_store import ModelStore, set_alias


def test_delete_removes_a_version_and_rejects_needed_versions(tmp_path: Path) -> None:
    publish_versions(tmp_path, 3)
    set_alias(tmp_path, "m", "stable", 1)
    assert run("delete", tmp_path, "m", "2") == (0, "", "m: removed version 2\n")
    for model, version, reason in (
        ("m", "1", "version 1 is what alias stable names"),
        ("m", "2", "version 2 does not exist; versions are 1, 3"),
        ("m", "3", "version 3 is the newest, which stays"),
        ("n", "1", "there is no model 'n'"),
    ):
        assert reason in error_of("delete", tmp_path, model, version)
    assert ModelStore(tmp_path).versions("m") == [1, 3]
