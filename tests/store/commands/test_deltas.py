"""Tests of `embedserve deltas`: it lists, shows, verifies, undoes and compacts a training job's
deltas."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delta_keys import key_pair, replace_file, resealed
from store.commands.conftest import error_of, run

from embedserve_store import Bags, DeltaWriter, ModelStore
from embedserve_store.format.delta_manifest import manifest_name


@pytest.fixture
def own_store(own_store: Path) -> Path:
    """Returns a test's own copy of the store, with version 1 of "shop" and 25 deltas."""
    table = ModelStore(own_store).manifest("shop").tables[0]
    with DeltaWriter(own_store, model="shop") as writer:
        for seq in range(1, 26):
            rows = np.full((2, table.embedding_dim), seq, np.float32)
            writer.push_rows({table.name: ([0, 1 + seq % 6], rows)}, step=10 * seq)
    return own_store


def test_the_last_deltas_are_listed(own_store: Path) -> None:
    code, out, _ = run("deltas", own_store, "shop")
    title, head, *lines = out.splitlines()
    assert code == 0
    assert title == "line 1 of shop: 25 deltas after version 1, the last 20"
    assert head.split() == ["seq", "as", "of", "step", "rows", "bytes", "writer", "run"]
    assert [line.split()[0] for line in lines] == [str(seq) for seq in range(6, 26)]
    assert lines[-1].split()[2:4] == ["250", "2"]
    assert run("deltas", "list", own_store, "shop", "--last", "0")[1].count("\n") == 27


def test_single_delta_is_shown(own_store: Path) -> None:
    code, out, _ = run("deltas", own_store, "shop", 7)
    assert code == 0
    assert out.startswith("delta 7 of line 1 of shop: rows as of 20")
    assert ", after step 70, " in out
    assert " in 1 file\n" in out
    table = ModelStore(own_store).manifest("shop").tables[0].name
    assert out.splitlines()[-1].split() == [table, "2"]
    missing = "shop: delta 26 of line 1 does not exist; after version 1 it has 1 to 25\n"
    assert error_of("deltas", own_store, "shop", 26).endswith(missing)


def test_goldens_are_shown_and_verified(own_store: Path) -> None:
    manifest = ModelStore(own_store).manifest("shop")
    lengths = np.zeros((len(manifest.features), 3), np.int32)
    lengths[0] = 1, 2, 0
    answers = np.zeros((3, sum(manifest.length_per_key)), np.float32)
    with DeltaWriter(own_store, model="shop") as writer:
        writer.push_rows({}, goldens=(Bags(np.array([0, 1, 2]), lengths, None), answers))
    shown = run("deltas", own_store, "shop", 26)[1].splitlines()
    assert shown[2] == "goldens: 3 examples with 3 ids, as training in float32 answers them"
    assert not any(
        "goldens" in line for line in run("deltas", own_store, "shop", 25)[1].splitlines()
    )
    assert run("deltas", "verify", own_store, "shop")[0] == 0
    path = own_store / "shop/deltas/1" / manifest_name(26)
    whole = path.read_bytes()
    replace_file(path, resealed(whole, lambda data: data["goldens"]["numbers"].update(shape=[2])))
    error = error_of("deltas", "verify", own_store, "shop")
    assert "goldens: numbers: data has 24 bytes, [2] means 16" in error
    replace_file(path, resealed(whole, lambda data: data["goldens"].update(dtype="float64")))
    assert "goldens: dtype is 'float64'" in error_of("deltas", "verify", own_store, "shop")
    replace_file(path, whole)
    code, _, stderr = run("deltas", "compact", own_store, "shop")  # the rows give other results
    assert (code, "delta 26 of line 1: goldens: " in stderr) == (1, True)


def test_deltas_are_verified_and_compacted(own_store: Path) -> None:
    verified = run("deltas", "verify", own_store, "shop")
    assert verified[0] == 0
    assert "shop: deltas 1 to 25 of line 1 are as they were written, 50 rows, " in verified[2]
    code, _, stderr = run("deltas", "compact", own_store, "shop", "--seq", 24)
    assert code == 0
    assert "published shop version 2: " in stderr
    assert " with the deltas of line 1 up to 24, in " in stderr
    title = run("deltas", own_store, "shop")[1].splitlines()[0]
    assert title == "line 1 of shop: 1 delta after version 2 (seq 24)"
    assert run("verify", own_store, "shop", 2)[0] == 0
    assert "line 1 of shop: no deltas after version 3 (seq 25)" in (
        run("deltas", "compact", own_store, "shop") and run("deltas", own_store, "shop")[1]
    )


def test_undo_is_reported_and_listed(own_store: Path) -> None:
    code, out, stderr = run(
        "deltas", "undo", own_store, "shop", "--to", 23, "--why", "CTR \x1b[31mfell"
    )
    assert (code, out) == (0, "")
    assert stderr == (
        "shop: delta 26 of line 1 reverts to delta 23. Servers that follow the line apply it at "
        "their next poll.\n"
    )
    last = [line.split() for line in run("deltas", own_store, "shop")[1].splitlines()[-4:]]
    assert [line[0] for line in last] == ["23", "24", "25", "26"]
    assert ["undone" in line for line in last] == [False, True, True, False]
    assert last[-1][2:4] == ["to", "23"]
    shown = run("deltas", own_store, "shop", 26)[1].splitlines()
    assert shown[-1] == "reverts to delta 23: CTR \\x1b[31mfell"
    assert "undo" in run("history", own_store, "shop")[1]
    error = error_of("deltas", "undo", own_store, "shop", "--to", 26, "--why", "")
    assert "delta 26: expected 0 to 25; line 1 ends with 26" in error


def test_undos_are_signed_and_deltas_verified_by_key(
    own_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = key_pair(tmp_path)
    run("deltas", "compact", own_store, "shop")  # the deltas so far are not signed
    undo = "deltas", "undo", own_store, "shop", "--version", 1, "--to", 25, "--why", "test"
    assert run(*undo)[0] == 1  # nothing to undo
    with DeltaWriter(own_store, model="shop", version=1, key=keys.private) as writer:
        writer.push_rows({})
    assert run(*undo, "--key", keys.private)[0] == 0
    code, _, stderr = run("deltas", "verify", own_store, "shop", "--key", keys.public)
    assert code == 0
    assert f"are as they were written and signed by a key in {keys.public}, 0 rows" in stderr
    assert (
        run("deltas", own_store, "shop", 27)[1]
        .splitlines()[1]
        .endswith(", signed (deltas verify --key verifies it)")
    )
    assert (
        run("deltas", own_store, "shop", 7, "--version", 1)[1]
        .splitlines()[1]
        .endswith(", not signed")
    )
    monkeypatch.setenv("EMBEDSERVE_DELTA_KEY", str(keys.public))
    for command in ("verify", "compact"):
        code, _, stderr = run("deltas", command, own_store, "shop", "--version", 1)
        assert (code, "0001.json: has no signature of a key in " in stderr) == (1, True)
        assert run("deltas", command, own_store, "shop")[0] == 0
    monkeypatch.setenv("EMBEDSERVE_DELTA_SIGNING_KEY", str(keys.public))
    assert "has no private key in PEM" in error_of(*undo)


def test_deltas_that_no_version_needs_are_pruned(own_store: Path) -> None:
    command = "deltas", "prune", own_store, "shop", "--keep-hours"
    assert run(*command, 0)[2] == (
        "shop: removed no deltas: versions need them, or they are younger than 0 hours\n"
    )
    run("deltas", "compact", own_store, "shop", "--seq", 20)
    run("prune", own_store, "shop", "--keep", 1)
    pruned = "deltas 1 to 20 of line 1\n"
    assert run(*command, 0, "--dry-run")[2] == f"shop: would remove {pruned}"
    assert run(*command, 0)[2] == f"shop: removed {pruned}"
    assert len([*(own_store / "shop/deltas/1").iterdir()]) == 10


def test_missing_delta_file_is_a_one_line_error(own_store: Path) -> None:
    path = next((own_store / "shop/deltas/1").glob("*13.*.safetensors"))
    path.unlink()
    assert f"{path.name}: cannot be read" in error_of("deltas", "verify", own_store, "shop")
    assert run("deltas", "compact", own_store, "shop")[0] == 1
    assert ModelStore(own_store).versions("shop") == [1]


def test_list_shows_missing_deltas(own_store: Path) -> None:
    for seq in (1, 8, 20, 21):
        (own_store / "shop/deltas/1" / manifest_name(seq)).unlink()
    code, out, _ = run("deltas", own_store, "shop")
    title, _, *lines = (line.split() for line in out.splitlines())
    assert (code, title[4]) == (0, "21")
    seqs = [*range(3, 8), 8, *range(9, 20), 20, *range(22, 26)]
    assert [int(line[0]) for line in lines] == seqs
    assert lines[5] == ["8", "missing"]
    assert lines[17] == ["20", "to", "21", "missing"]
    _, _, *every = run("deltas", own_store, "shop", "--last", 0)[1].splitlines()
    assert (every[0].split(), len(every)) == (["1", "missing"], 24)
    run("deltas", "undo", own_store, "shop", "--to", 22, "--why", "")
    newest = run("deltas", own_store, "shop", "--last", 6)[1].splitlines()[2:]
    assert ["undone" in line for line in newest] == [False, False, False, True, True, True, False]
    assert run("deltas", "verify", own_store, "shop")[0] == 1


@pytest.mark.parametrize(
    "command", [("list",), ("verify",), ("undo", "--to", 1, "--why", ""), ("compact",), ("prune",)]
)
def test_store_without_access_is_distinguished_from_a_damaged_store(
    own_store: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[Any, ...]
) -> None:
    name, *options = command
    if name == "prune":
        run("deltas", "compact", own_store, "shop", "--seq", 20)
        run("prune", own_store, "shop", "--keep", 1)
        options = ["--keep-hours", 0]
    real = Path.open

    def deny_access(path: Path, *mode: Any, **more: Any) -> Any:
        if path.name.endswith(".json") and "deltas" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", deny_access)
        code, _, stderr = run("deltas", name, own_store, "shop", *options)
    assert code == 3, stderr
    stderr = stderr.splitlines(keepends=True)[-1]  # the last line, below the progress
    assert stderr.startswith("embedserve: no access to the store: ")
    assert stderr.endswith(".json: cannot be read: Permission denied\n")
    for path in (own_store / "shop/deltas/1").glob("*.json"):
        path.unlink()
        path.write_bytes(b"{}")
    code, _, stderr = run("deltas", name, own_store, "shop", *options)
    assert (code, "no access" in stderr) == (1, False)


def test_seq_out_of_range_is_rejected(own_store: Path) -> None:
    large = 1 << 32
    for command in (
        ("list", own_store, "shop", large),
        ("compact", own_store, "shop", "--seq", large),
    ):
        assert f"seq is {large}, expected 1 to 4294967295" in error_of("deltas", *command)
    error = error_of("deltas", "undo", own_store, "shop", "--to", large, "--why", "")
    assert f"delta {large}: expected 0 to 24" in error


def test_version_without_deltas_is_reported(store: Path) -> None:
    assert run("deltas", store, "shop")[1] == "line 1 of shop: no deltas after version 1\n"
    assert "there is no delta after version 1" in error_of("deltas", "verify", store, "shop")


def test_help_lists_the_commands() -> None:
    code, out, _ = run("deltas", "--help")
    assert code == 0
    for name in ("list", "verify", "undo", "compact", "prune"):
        assert f" {name} " in out
