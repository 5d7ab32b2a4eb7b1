"""Tests of `embedserve alias`: an alias is set, moved, removed, listed and resolved."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from store.commands.conftest import error_of, run
from store.one_table import publish_versions

from embedserve.config import ServeSettings
from embedserve.processes.startup.loading import open_versions
from embedserve_store import DeltaWriter
from embedserve_store.errors import StoreError
from embedserve_store.model_store import ModelStore


def test_an_alias_is_set_shown_and_removed(own_store: Path) -> None:
    assert run("alias", own_store, "shop") == (0, "aliases of shop: none\n", "")
    code, _, stderr = run("alias", own_store, "shop", "stable", "1", "--why", "recall is up")
    assert (code, stderr) == (0, "shop: stable is version 1: a new alias\n")
    _, shown, _ = run("alias", own_store, "shop")
    (line,) = [line.split() for line in shown.splitlines() if "stable" in line]
    assert line[:2] == ["stable", "1"]
    assert line[-3:] == ["recall", "is", "up"]
    assert "alias stable: version 1" in run("inspect", own_store, "shop")[1]
    assert (
        run("alias", own_store, "shop", "stable", "--remove")[2]
        == "shop: stable is no alias any more\n"
    )
    lines = [line.split()[:2] for line in run("alias", own_store, "shop", "stable")[1].splitlines()]
    assert lines[-2:] == [["stable", "removed"], ["stable", "1"]]


def test_alias_is_accepted_in_place_of_a_version(own_store: Path) -> None:
    run("alias", own_store, "shop", "stable", "1")
    for command in (
        ("verify", own_store, "shop", "stable"),
        ("inspect", own_store, "shop", "stable"),
        ("plan", own_store, "shop", "stable"),
        ("diff", own_store, "shop", "1", "stable"),
        ("diff", own_store / "shop" / "stable", own_store / "shop" / "1"),
    ):
        code, _, stderr = run(*command)
        assert code == 0, (command, stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shop", "stable", "2"), "shop: version 2 does not exist; versions are 1"),
        (("shop", "stable", "best"), "shop: 'best' is no version and no alias, aliases are none"),
        (("shop", "stable", ""), "shop: '' is no version and no alias, aliases are none"),
        (("shop", "1", "1"), "alias name '1': use up to 64 letters"),
        (("shop", "stable", "--remove"), "shop: no alias 'stable' to remove"),
        (("shop", "stable", "--why", "x"), "--why belongs to a change: name the version"),
        (("shop", "stable", "1", "--remove"), "--remove takes no version, found '1'"),
        (("shoes",), "there is no model 'shoes'; models are shop"),
    ],
)
def test_invalid_alias_change_is_a_one_line_error(
    own_store: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in error_of("alias", own_store, *arguments)


def test_server_serves_the_version_of_an_alias(own_store: Path) -> None:
    run("alias", own_store, "shop", "stable", "1")
    (version,) = open_versions(ServeSettings(str(own_store), model=("shop@stable",))).values()
    assert version.manifest.version == 1
    for requested, message in (
        ("shop@best", "'best' is no version and no alias, aliases are stable"),
        ("shop@2", r"version 2 does not exist; versions are 1"),
    ):
        with pytest.raises(StoreError, match=message):
            open_versions(ServeSettings(str(own_store), model=(requested,)))
    with pytest.raises(ValueError, match="model is 'shop@': expected NAME, NAME@VERSION or"):
        open_versions(ServeSettings(str(own_store), model=("shop@",)))


def test_markup_and_escapes_in_a_reason_are_printed_literally(own_store: Path) -> None:
    why = "fix [/x] [red]bug[/red]\x1b[31m\nfake"
    run("alias", own_store, "shop", "stable", "1", "--why", why)
    code, shown, _ = run("alias", own_store, "shop")
    assert code == 0
    assert "fix [/x] [red]bug[/red]\\x1b[31m\\x0afake" in shown


@pytest.fixture
def two_versions(tmp_path: Path) -> Path:
    """Returns a store with versions 1 and 2 of "m"."""
    publish_versions(tmp_path / "two", 2)
    return tmp_path / "two"


def test_alias_name_similar_to_another_requires_the_new_option(two_versions: Path) -> None:
    run("alias", two_versions, "m", "stable", "1")
    run("alias", two_versions, "m", "canary", "2")
    assert error_of("alias", two_versions, "m", "stble", "2") == (
        "embedserve: m has no alias 'stble', did you mean 'stable'? Aliases are canary, stable; "
        "--new makes another\n"
    )
    assert ModelStore(two_versions).aliases("m").keys() == {"canary", "stable"}
    assert run("alias", two_versions, "m", "stble", "2", "--new")[2] == (
        "m: stble is version 2: a new alias beside canary, stable\n"
    )
    assert run("alias", two_versions, "m", "stble", "1")[2] == (
        "m: stble is version 1: it was version 2\n"
    )
    assert run("alias", two_versions, "m", "dark", "1")[0] == 0


def test_alias_change_reports_the_other_aliases(two_versions: Path) -> None:
    run("alias", two_versions, "m", "stable", "2")
    run("alias", two_versions, "m", "canary", "2", "--share", "10", "--shadow", "5")
    assert run("alias", two_versions, "m", "stable", "1")[2].splitlines() == [
        "m: stable is version 1: it was version 2",
        "m: canary still is version 2, with a share of 10 %, in the shadow of 5 %",
    ]


def test_alias_shows_its_delta(two_versions: Path) -> None:
    with closing(DeltaWriter(two_versions, model="m", version=1)) as writer:
        writer.push_rows({"t": ([1], torch.zeros(1, 4))})
    stable = ("alias", two_versions, "m", "stable")
    stderr = run(*stable, "1", "--at-seq", "1", "--share", "5")[2]
    assert stderr == "m: stable is version 1 at delta 1, with a share of 5 %: a new alias\n"
    assert "1 at delta 1, with a share of 5 %" in run(*stable)[1]
    assert "alias stable: version 1 at delta 1, with" in run("inspect", two_versions, "m")[1]
    run(*stable, "2")
    assert (
        run("rollback", two_versions, "m")[2]
        == "m: stable is version 1 at delta 1: it was version 2\n"
    )
    assert error_of(*stable, "1", "--at-seq", "2") == (
        f"embedserve: {two_versions}/m: at_seq is 2, and line 1 has no such delta "
        "(embedserve deltas)\n"
    )
    assert error_of(*stable, "--at-seq", "0") == (
        "embedserve: --at-seq belongs to a change: name the version that the alias moves to\n"
    )


def test_rollback_reports_the_changed_aliases(two_versions: Path) -> None:
    for version in ("1", "2"):
        run("alias", two_versions, "m", "stable", version)
    run("alias", two_versions, "m", "canary", "2", "--share", "10")
    code, out, stderr = run("rollback", two_versions, "m", "--why", "CTR fell")
    assert (code, out) == (0, "")
    assert stderr.splitlines() == [
        "m: canary is no alias any more: it was version 2, with a share of 10 %",
        "m: stable is version 1: it was version 2",
    ]
    assert ModelStore(two_versions).alias_history("m", "stable")[0].why == "CTR fell"
    assert (
        run("rollback", two_versions, "m", "--to", "2")[2]
        == "m: stable is version 2: it was version 1\n"
    )
    assert "/m: '' is no version and no alias" in error_of(
        "rollback", two_versions, "m", "--to", ""
    )
    assert error_of("rollback", two_versions, "m", "--alias", "stble") == (
        f"embedserve: {two_versions}/m: no alias 'stble', aliases are stable\n"
    )


def test_server_start_skips_an_alias_removed_by_a_rollback(
    two_versions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that restarts after the rollback serves the same names as a server that kept
    running. A name that never was an alias is an error, and so is the removed alias if it is the
    only name or the default model."""
    for version in ("1", "2"):
        run("alias", two_versions, "m", "stable", version)
    run("alias", two_versions, "m", "canary", "2", "--share", "10")
    run("rollback", two_versions, "m")
    names = ("m@canary", "m@stable")
    versions = open_versions(ServeSettings(str(two_versions), model=names))
    assert {name: one.manifest.version for name, one in versions.items()} == {"m@stable": 1}
    (message,) = caplog.messages
    assert message.startswith("m@canary is not served, its alias was removed: ")
    for settings in (
        ServeSettings(str(two_versions), model=("m@stable", "m@cannary")),
        ServeSettings(str(two_versions), model=("m@canary",)),
        ServeSettings(str(two_versions), model=names, default_model="m@canary"),
    ):
        with pytest.raises(StoreError, match="is no version and no alias, aliases are stable"):
            open_versions(settings)
