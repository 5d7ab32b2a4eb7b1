"""Tests of `embedserve copy`: it prints what it copied, what existed and what it left out."""

from pathlib import Path

import pytest
from store.commands import conftest
from store.commands.conftest import error_of

from embedserve_store import DeltaWriter


def run(*arguments: str | Path) -> tuple[int, str]:
    code, _, stderr = conftest.run(*arguments)
    # Keeps the messages: lines of progress bars begin otherwise.
    return code, "".join(line for line in stderr.splitlines(True) if line.startswith("shop"))


def test_copy_reports_copied_versions_notes_and_aliases(own_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    assert run("note", own_store, "shop", "1", "recall is up")[0] == 0
    assert run("alias", own_store, "shop", "stable", "1")[0] == 0
    first = f"shop: copied versions to {target}: 1\nshop: copied notes: 1\n"
    assert run("copy", own_store, target, "shop@stable") == (0, first)
    second = (
        f"shop: copied versions to {target}: none\nshop: there already: 1\n"
        "shop: copied changes of aliases: stable\n"
    )
    assert run("copy", own_store, target, "--aliases") == (0, second)
    assert run("verify", target, "shop", "stable")[0] == 0


def test_copied_deltas_are_counted_and_may_be_excluded(own_store: Path, tmp_path: Path) -> None:
    with DeltaWriter(own_store, model="shop") as writer:
        for _ in range(2):
            writer.push_rows({})
    versions = "shop: copied versions to {}: 1\n"
    without, target = tmp_path / "w", tmp_path / "t"
    assert run("copy", own_store, without, "--no-deltas") == (0, versions.format(without))
    assert not (without / "shop" / "deltas").exists()
    expected = versions.format(target) + "shop: copied deltas: 2\n"
    assert run("copy", own_store, target) == (0, expected)
    assert run("deltas", "verify", target, "shop")[0] == 0


def test_link_without_a_target_is_no_file_of_a_version(own_store: Path, tmp_path: Path) -> None:
    (own_store / "shop" / "1" / "extra").symlink_to("nowhere")
    assert run("copy", own_store, tmp_path / "t")[0] == 0
    assert not (tmp_path / "t" / "shop" / "1" / "extra").is_symlink()
    plan = own_store / "shop" / "1" / "plan.json"
    plan.unlink()
    plan.symlink_to("nowhere")
    assert error_of("copy", own_store, tmp_path / "other") == (
        f"embedserve: {plan}: does not exist\n"
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("shop@7", "version 7 does not exist; versions are 1"),
        ("shop@x", "'x' is no version and no alias"),
        ("other", "there is no model 'other'; models are shop"),
        ("shop@", "model is 'shop@', expected MODEL, MODEL@VERSION or MODEL@ALIAS"),
        ("@1", "model is '@1', expected MODEL, MODEL@VERSION or MODEL@ALIAS"),
        ("", "model is '', expected MODEL, MODEL@VERSION or MODEL@ALIAS"),
    ],
)
def test_unknown_or_malformed_model_is_a_one_line_error(
    store: Path, tmp_path: Path, model: str, message: str
) -> None:
    assert message in error_of("copy", store, tmp_path / "t", model)
    assert not (tmp_path / "t").exists()


def test_a_source_without_models_is_an_error(tmp_path: Path) -> None:
    source, target = tmp_path / "s", tmp_path / "t"
    source.mkdir()
    assert error_of("copy", source, target) == f"embedserve: no models in {source}\n"
    assert not target.exists()
