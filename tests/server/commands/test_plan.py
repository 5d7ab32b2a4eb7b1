"""Tests of `embedserve plan`: a plan for a description of tables, or that of a published
version."""

import json
from pathlib import Path

import pytest
import torch
from server.python import run_python
from typer.testing import CliRunner, Result

from embedserve.commands.cli import app
from embedserve_store import publish
from embedserve_store.plans.plan import read_plan
from embedserve_store.sources.description import read_description

TABLES = """
tables:
  - {name: user, num_embeddings: 1000, embedding_dim: 64, feature_names: [user], pooling: sum}
  - name: movie
    num_embeddings: 1001
    embedding_dim: 64
    feature_names: [movie, history]
    pooling: mean
    dtype: int8
"""


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def words(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines()]


def test_description_is_planned_like_publish(tables: Path) -> None:
    lines = words(run(tables))
    assert lines[0] == ["plan", "over", "1", "rank"]
    user = ["A", "user", "1,000", "64", "float32", "250.0", "KiB", "table_wise", "rank", "0"]
    assert user in lines
    assert any(line[:2] == ["rank", "0"] and line[-1] == "2,001" for line in lines)


def test_plan_by_table_shows_shards_of_each_rank(tables: Path) -> None:
    result = run(tables, "--world-size", "2", "--sharding", "user=row_wise,movie=column_wise")
    lines = words(result)
    assert [line[-5:] for line in lines if "row_wise" in line] == [
        ["row_wise", "2", "x", "500", "rows"]
    ]
    (movie,) = [line for line in lines if "column_wise" in line]
    assert movie[-6:] == ["2", "x", "32", "columns,", "ranks", "0-1"]
    shares = [word for line in lines for word in line if word.endswith("%")]
    assert shares == ["50.0%", "50.0%"]
    assert "on the CPU 70.4 KiB of column shards are copied" in result.stderr


def test_sharding_of_one_table_keeps_described_sharding_of_other_tables(tables: Path) -> None:
    tables.write_text(f"{TABLES}    sharding: column_wise\n")
    result = run(tables, "--world-size", "2", "--sharding", "user=row_wise")
    kinds = {line[1]: line[7] for line in words(result) if line[:1] in (["A"], ["B"])}
    assert kinds == {"user": "row_wise", "movie": "column_wise"}


def test_sharding_of_one_table_keeps_stored_sharding_of_other_tables(
    tables: Path, tmp_path: Path
) -> None:
    rows = {
        "embedding_bags.user.weight": torch.ones(1000, 64),
        "embedding_bags.movie.weight": torch.ones(1001, 64),
    }
    sharding = {"user": "table_wise", "movie": "column_wise"}
    described = read_description(tables)
    publish(rows, tmp_path / "store", model="m", tables=described, sharding=sharding, world_size=2)
    result = run(tmp_path / "store", "m", "--sharding", "user=row_wise")
    kinds = {line[1]: line[7] for line in words(result) if line[:1] in (["A"], ["B"])}
    assert kinds == {"user": "row_wise", "movie": "column_wise"}
    result = run(tmp_path / "store", "m", "--sharding", "row_wise")
    kinds = {line[1]: line[7] for line in words(result) if line[:1] in (["A"], ["B"])}
    assert kinds == {"user": "row_wise", "movie": "row_wise"}


def test_fitting_plan_shows_memory_of_the_fullest_rank(tables: Path) -> None:
    result = run(tables, "--world-size", "2", "--sharding", "row_wise", "--device-memory", "400KB")
    assert result.exit_code == 0
    assert "fits: the fullest rank takes 158.3 KiB of its 390.6 KiB, 41%" in result.stderr


def test_plan_that_exceeds_memory_is_shown_and_rejected_in_one_line(
    tables: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.json"
    result = run(tables, "--device-memory", "100KB", "--output", output)
    assert result.exit_code == 1
    assert "|" in result.stdout
    (line,) = result.stderr.splitlines()
    assert "rank 0 would hold 324,068 bytes of tables, it has 100,000" in line
    assert not output.exists()


def test_written_plan_is_read_again(tables: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    first = run(tables, "--world-size", "2", "--sharding", "row_wise", "--output", output)
    assert first.exit_code == 0, first.output
    assert read_plan(output).world_size == 2
    again = run(tables, "--sharding", output)
    assert again.stdout == first.stdout
    other = run(tables, "--sharding", output, "--world-size", "3")
    assert other.exit_code == 1
    assert "world_size is 3, but the plan is for 2 ranks" in other.stderr


def test_parts_of_several_hosts_are_shown(tables: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    result = run(tables, "--hosts", "3", "--world-size", "2", "--output", output)
    lines = words(result)
    assert ["rows", "over", "3", "hosts,", "each", "with", "2", "ranks"] in lines
    assert ["A", "user", "2", "x", "333", "+", "334", "rows"] in lines
    assert ["B", "movie", "333", "+", "2", "x", "334", "rows"] in lines
    parts = [line for line in lines if line[:1] == ["part"]]
    assert [line[1] for line in parts] == ["0", "1", "2"]
    assert [line[-1] for line in parts] == ["666", "667", "668"]
    assert [line[-2] for line in parts] == ["33.3%", "33.3%", "33.4%"]
    assert read_plan(output).hosts is not None
    assert run(tables, "--sharding", output).stdout == result.stdout
    one = run(tables, "--sharding", output, "--hosts", "1")
    assert "part 0" not in one.stdout


def test_each_part_must_fit_the_memory_of_its_host(tables: Path) -> None:
    result = run(tables, "--hosts", "3", "--device-memory", "110KB")
    assert result.exit_code == 0, result.stderr
    assert "fits: the fullest rank takes 105.7 KiB of its 107.4 KiB" in result.stderr
    result = run(tables, "--hosts", "2", "--device-memory", "110KB")
    assert result.exit_code == 1
    assert "part 0 of 2: rank 0 would hold 162,000 bytes of tables" in result.stderr


def test_constraints_are_read_from_a_file(tables: Path, tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.json"
    fields = {"sharding_types": ["column_wise"], "min_partition": 16}
    constraints.write_text(json.dumps({"movie": fields}))
    options = ("--world-size", "4", "--sharding", "auto", "--constraints", constraints)
    (movie,) = [line for line in words(run(tables, *options)) if "column_wise" in line]
    assert movie[-6:-2] == ["4", "x", "16", "columns,"]


def test_stored_version_is_planned_for_another_number_of_hosts(two_rank_store: Path) -> None:
    lines = words(run(two_rank_store, "shop", "--hosts", "2"))
    assert [line[:2] for line in lines if line[:1] == ["part"]] == [["part", "0"], ["part", "1"]]
    lines = words(run(two_rank_store, "shop", "--hosts", "2", "--world-size", "3"))
    assert [line[:2] for line in lines if line[:1] == ["part"]] == [["part", "0"], ["part", "1"]]
    lines = words(run(two_rank_store, "shop", "--world-size", "3"))
    assert not [line for line in lines if line[:1] == ["part"]]


def test_a_version_shows_its_stored_plan(two_rank_store: Path) -> None:
    lines = words(run(two_rank_store, "shop"))
    assert lines[0] == ["plan", "over", "2", "ranks"]
    assert any(line[-5:] == ["row_wise", "4", "+", "3", "rows"] for line in lines)
    assert words(run(two_rank_store, "shop", "1")) == lines


def test_remote_version_is_planned_without_being_pulled(
    two_rank_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for options in ((), ("--world-size", "3"), ("--kubernetes", "--store", "s3://bucket/store")):
        [local, remote] = [
            run(store, "shop", *options).stdout.replace(f"file://{two_rank_store}", "STORE")
            for store in (two_rank_store, f"file://{two_rank_store}")
        ]
        assert local.replace(str(two_rank_store), "STORE") == remote
    assert not (tmp_path / "cache").exists()


def test_a_stored_plan_is_shown_without_importing_torch(two_rank_store: Path) -> None:
    code = (
        "import sys; "
        "from embedserve.commands.planning.plan import PlanOptions, plan_version; "
        "plan_version(sys.argv[1], 'shop', None, PlanOptions(device_memory='1GB')); "
        "assert 'torch' not in sys.modules"
    )
    done = run_python("-c", code, two_rank_store)
    assert (done.returncode, done.stdout[:17]) == (0, "plan over 2 ranks"), done.stderr


def test_stored_version_is_replanned_for_another_number_of_ranks(two_rank_store: Path) -> None:
    result = run(two_rank_store, "shop", "--world-size", "3")
    assert words(result)[0] == ["plan", "over", "3", "ranks"]
    assert "2 x 3 + 1 rows" in result.stdout
    assert "planned anew: the stored plan is for 2 ranks" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sharding", "rows"), "table 'user': sharding is 'rows', expected one of"),
        (("--sharding", ""), "table 'user': sharding is '', expected one of"),
        (("--sharding", "nobody=row_wise"), "sharding names table 'nobody'"),
        (("--sharding", "none.json"), "none.json: cannot be read"),
        (("--device-memory", "much"), "device_memory is 'much', expected a size such as 80GB"),
        (("--device-memory", ""), "device_memory is '', expected a size such as 80GB"),
        (("--device-type", "tpu"), "device_type is 'tpu', expected cpu or cuda"),
        (("--constraints", "none.yaml"), "none.yaml: cannot be read"),
    ],
)
def test_invalid_option_prints_one_error_line(
    tables: Path, options: tuple[str, ...], message: str
) -> None:
    result = run(tables, *options)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize("option", ["--world-size", "--hosts"])
@pytest.mark.parametrize("count", ["0", "1025"])
def test_number_of_ranks_and_hosts_is_bounded(tables: Path, option: str, count: str) -> None:
    result = run(tables, option, count)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"'{option}'" in result.stderr


def test_store_without_a_model_name_lists_its_models(two_rank_store: Path) -> None:
    result = run(two_rank_store)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is a store, name one of its models: shop" in result.stderr
