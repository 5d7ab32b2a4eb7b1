"""Tests of the load test's requests. They never import locust, which replaces sockets and
threads."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.fake_engine import FakeEngine
from server.fake_models import VOCABULARIES, model_info, ruled_info, unpooled_info
from server.live import JSON, PROTOBUF, live_server

from embedserve_client import IdRule, ModelInfo, ModelList, TableInfo
from embedserve_client.core.models import model_list_from_json
from embedserve_proto import embedding_pb2 as pb
from ids import FeatureIds, ids_by_feature, read_vocabularies, spread, zipf_ranks
from traffic import Settings, Traffic, choose_model, kind_of_error, name_of, parse_sizes

ROWS = 1000
LOADTEST = Path(__file__).parents[2] / "clients" / "loadtest"


def rule(**fields: object) -> IdRule:
    defaults = {
        "rule": "rows",
        "id_type": "int64",
        "entries": 0,
        "modulus": 0,
        "offset": 0,
        "unknown": "error",
        "default_row": 0,
        "examples": (),
    }
    return IdRule(**(defaults | fields))  # type: ignore[arg-type]


def model(*tables: tuple[str, tuple[str, ...], IdRule], name: str = "shop") -> ModelInfo:
    """Returns a model with ``tables``, given as (name, features, rule), of ROWS rows each."""
    features = tuple(dict.fromkeys(one for _, features, _ in tables for one in features))
    return ModelInfo(
        model=name,
        version=1,
        features=features,
        keys=features,
        length_per_key=(4,) * len(features),
        tables=tuple(
            TableInfo(table, ROWS, 4, "sum", "float32", features, "table_wise", ids)
            for table, features, ids in tables
        ),
        is_pooled=True,
    )


SETTINGS = Settings(sizes=((1, 90), (50, 9), (500, 1)), ids_max=8, zipf=1.05, seed=3)


@pytest.mark.parametrize("exponent", [0, 0.5, 1, 1.05, 3, 10])
@pytest.mark.parametrize("count", [1, 2, ROWS, 2**31])
def test_ranks_are_in_range(exponent: float, count: int) -> None:
    ranks = zipf_ranks(np.random.default_rng(0), 10_000, count, exponent)
    assert ranks.min() >= 0
    assert ranks.max() < count


@pytest.mark.parametrize("exponent", [0, 0.5, 1, 1.05, 2])
def test_rank_frequencies_follow_the_power_law(exponent: float) -> None:
    draws = 200_000
    ranks = zipf_ranks(np.random.default_rng(0), draws, ROWS, exponent)
    edges = np.linspace(1, ROWS + 1, 200_001)
    density = edges[:-1] ** -exponent
    mass = density.reshape(ROWS, -1).sum(axis=1)
    for top in (1, 10, 100):
        expected = mass[:top].sum() / mass.sum()
        assert (ranks < top).mean() == pytest.approx(expected, rel=0.03, abs=0.002)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 28, 997, ROWS])
def test_spread_maps_ranks_to_distinct_numbers(count: int) -> None:
    assert sorted(spread(np.arange(count), count)) == list(range(count))


def test_popular_ids_are_not_adjacent() -> None:
    assert np.abs(np.diff(spread(np.arange(10), ROWS))).min() > ROWS // 10


def test_spreading_the_largest_count_does_not_overflow() -> None:
    numbers = spread(np.array([0, 2**30, 2**31 - 1]), 2**31)
    assert (numbers >= 0).all()
    assert (numbers < 2**31).all()


def test_ids_follow_the_id_rule_of_their_table() -> None:
    found = ids_by_feature(
        model(
            ("plain", ("a", "b"), rule()),
            ("hashed", ("c",), rule(rule="modulo", modulus=17)),
            ("words", ("d",), rule(rule="map", id_type="string", entries=9, examples=("x", "y"))),
            ("mapped", ("e",), rule(rule="map", entries=30, unknown="skip")),
            ("strict", ("f",), rule(rule="map", entries=30)),
            ("mute", ("g",), rule(rule="map", id_type="string", entries=30, unknown="skip")),
        ),
        {},
    )
    assert {feature: ids.count for feature, ids in found.items()} == {
        "a": ROWS,
        "b": ROWS,
        "c": 17,
        "d": 2,
        "e": 30,
    }
    assert [feature for feature, ids in found.items() if not ids.is_known] == ["e"]
    assert set(found["d"].draw(np.random.default_rng(0), 50, 0)) == {"x", "y"}


def test_feature_of_two_tables_gets_ids_valid_in_both() -> None:
    small = rule(rule="modulo", modulus=7)
    assert ids_by_feature(model(("a", ("f",), rule()), ("b", ("f",), small)), {}) == {
        "f": FeatureIds(7)
    }
    strict = rule(rule="map", entries=30)
    assert ids_by_feature(model(("a", ("f",), rule()), ("b", ("f",), strict)), {}) == {}


def test_vocabulary_files_replace_the_ids_that_the_server_lists(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("-5\n9000000000\n")
    (tmp_path / "words.txt").write_text("\nfilm\u2028 noir\n", encoding="utf-8")
    option = f"mapped={tmp_path}/ids.txt,words={tmp_path}/words.txt"
    served = model(
        ("mapped", ("e",), rule(rule="map", entries=30)),
        ("words", ("d",), rule(rule="map", id_type="string", examples=("x",))),
    )
    found = ids_by_feature(served, read_vocabularies(option))
    random = np.random.default_rng(0)
    assert set(found["e"].draw(random, 50, 0).tolist()) == {-5, 9_000_000_000}
    assert set(found["d"].draw(random, 50, 0)) == {"", "film\u2028 noir"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("mapped", "'mapped' is not TABLE=FILE"),
        ("other={file}", "'shop' has no table 'other'"),
        ("mapped={file}", "'mapped' takes int64 ids: .*'word'"),
        ("mapped={empty}", "is empty"),
    ],
)
def test_invalid_vocabulary_option_is_named_in_the_error(
    tmp_path: Path, option: str, message: str
) -> None:
    (tmp_path / "file").write_text("word\n")
    (tmp_path / "empty").write_text("")
    served = model(("mapped", ("e",), rule(rule="map")))
    paths = {"file": tmp_path / "file", "empty": tmp_path / "empty"}
    with pytest.raises(ValueError, match=f"--vocabularies: .*{message}"):
        ids_by_feature(served, read_vocabularies(option.format(**paths)))


def bodies(traffic: Traffic, user: int, count: int = 50) -> list[bytes]:
    random = traffic.random(user)
    return [traffic.request(random).json() for _ in range(count)]


def test_requests_depend_only_on_seed_and_user() -> None:
    served = model(("t", ("a", "b"), rule()))
    first, same = (Traffic(served, SETTINGS, {}) for _ in range(2))
    other = Traffic(served, Settings(SETTINGS.sizes, 8, 1.05, seed=4), {})
    assert bodies(first, 0) == bodies(same, 0)
    assert bodies(first, 0) != bodies(first, 1)
    assert bodies(first, 0) != bodies(other, 0)


def test_request_sizes_follow_their_weights() -> None:
    sizes = ((1, 6.0), (5, 3.0), (50, 1.0))
    traffic = Traffic(model(("t", ("a",), rule())), Settings(sizes, 8, 1.05, 0), {})
    random = traffic.random(0)
    examples = [traffic.request(random).examples for _ in range(3000)]
    for size, weight in sizes:
        assert examples.count(size) / 3000 == pytest.approx(weight / 10, abs=0.03)


def test_json_and_protobuf_requests_hold_the_same_ids() -> None:
    served = model(
        ("t", ("a", "b"), rule()),
        ("words", ("d",), rule(rule="map", id_type="string", examples=("x", "y", "z"))),
    )
    traffic = Traffic(served, Settings(((7, 1),), 8, 1.05, 0), {})
    request = traffic.request(traffic.random(0))
    message, bags = request.message(), json.loads(request.json())["features"]
    assert (message.model, list(message.keys)) == ("shop", ["a", "b", "d"])
    assert [len(bags[key]) for key in message.keys] == [7, 7, 7]
    lengths = [len(bag) for key in message.keys for bag in bags[key]]
    assert np.frombuffer(message.lengths_bytes, "<i4").tolist() == lengths
    assert set(lengths) <= set(range(9))
    flat = [one for key in "ab" for bag in bags[key] for one in bag]
    assert np.frombuffer(message.ids_bytes, "<i8").tolist() == flat
    assert list(message.string_ids) == [one for bag in bags["d"] for one in bag]


async def test_server_accepts_generated_requests_for_every_kind_of_model() -> None:
    """Runs the real frontends over fake engines: models of every id rule, pooled and unpooled."""
    infos = [model_info("plain"), ruled_info(), unpooled_info()]
    names = [info.name for info in infos]
    async with live_server(*map(FakeEngine, infos)) as live:
        models = model_list_from_json((await live.http.get("/models")).content)
        vocabularies = {
            info.name: {
                table.name: [str(one) for one in VOCABULARIES[table.name]]
                for table in info.tables
                if table.name in VOCABULARIES and table.ids.rule == "map"
            }
            for info in infos
        }
        for name in names:
            traffic = Traffic(
                choose_model(models, name), Settings(((1, 1), (20, 1)), 4, 1, 0), vocabularies[name]
            )
            assert traffic.skipped == traffic.guessed == ()
            random = traffic.random(0)
            for _ in range(10):
                request = traffic.request(random)
                answer = await live.http.post(
                    f"/models/{name}/embed", content=request.json(), headers={"Content-Type": JSON}
                )
                assert answer.status_code == 200, answer.text
                assert "unknown_ids" not in answer.json()
                headers = {"Content-Type": PROTOBUF, "Accept": PROTOBUF}
                answer = await live.http.post(
                    f"/models/{name}/embed",
                    content=request.message().SerializeToString(),
                    headers=headers,
                )
                assert answer.status_code == 200, answer.text
                over_rest = pb.EmbedResponse.FromString(answer.content)
                assert over_rest.batch_size == request.examples
                assert await live.stub.Embed(request.message()) == over_rest


def test_features_without_known_ids_are_reported() -> None:
    served = model(
        ("t", ("a",), rule()),
        ("strict", ("f",), rule(rule="map", entries=30)),
        ("lenient", ("g",), rule(rule="map", entries=30, unknown="row")),
    )
    traffic = Traffic(served, SETTINGS, {})
    assert (traffic.skipped, traffic.guessed) == (("f",), ("g",))
    with pytest.raises(ValueError, match="--vocabularies: none is given, and 'shop' refuses"):
        Traffic(model(("strict", ("f",), rule(rule="map"))), SETTINGS, {})


def test_model_choice_is_the_named_the_default_or_the_only_model() -> None:
    one, two = model(("t", ("a",), rule()), name="one"), model(("t", ("a",), rule()), name="two")
    assert choose_model(ModelList((one, two), "two"), "") == two
    assert choose_model(ModelList((one, two), "two"), "one") == one
    assert choose_model(ModelList((one,), ""), "") == one
    with pytest.raises(ValueError, match="--model: the server has no default model; there are one"):
        choose_model(ModelList((one, two), ""), "")
    with pytest.raises(ValueError, match="--model: 'three' is not served; there are one, two"):
        choose_model(ModelList((one, two), ""), "three")


def test_version_names_are_resolved_like_in_requests() -> None:
    """A model name without a version means the first listed version, unless one is served as the
    newest."""
    stable = replace(
        model(("t", ("a",), rule(rule="modulo", modulus=5))), version=3, alias="stable"
    )
    new = replace(model(("t", ("a",), rule(rule="modulo", modulus=9))), version=4, alias="new")
    newest = replace(new, alias="")
    names = ("shop", "shop@stable", "shop@3", "shop@new", "shop@4")
    for versions, counts in (((stable, new), (5, 5, 5, 9, 9)), ((new, stable), (9, 5, 5, 9, 9))):
        for name, count in zip(names, counts, strict=True):
            traffic = Traffic(choose_model(ModelList(versions, ""), name), SETTINGS, {})
            request = traffic.request(traffic.random(0))
            assert (traffic.model, request.message().model) == (name, name)
            assert (
                ids_by_feature(choose_model(ModelList(versions, name), ""), {})["a"].count == count
            )
    assert choose_model(ModelList((stable, newest), ""), "shop").version == 4
    with pytest.raises(ValueError, match=r"'shop@5' is not served; there are shop@stable, shop$"):
        choose_model(ModelList((stable, newest), ""), "shop@5")


def test_sizes_option_is_parsed() -> None:
    assert parse_sizes("1:90,50:9.5") == ((1, 90), (50, 9.5))


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *[
            ("", "''"),
            ("1", "'1'"),
            ("1:2:3", "'1:2:3'"),
            ("1:1,0:1", "'0:1'"),
            ("1:nan", "'1:nan'"),
        ],
        ("many", "'many' is not EXAMPLES:WEIGHT"),
    ],
)
def test_invalid_sizes_are_named_in_the_error(option: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"--sizes: {wrong}"):
        parse_sizes(option)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids_max": 0}, "--ids-max: 0"),
        ({"zipf": -0.1}, "--zipf: -0.1"),
        ({"zipf": float("nan")}, "--zipf: nan"),
        ({"seed": -1}, "--seed: -1"),
    ],
)
def test_invalid_settings_are_named_in_the_error(changed: dict[str, float], message: str) -> None:
    given: dict[str, Any] = {"sizes": ((1, 1),), "ids_max": 8, "zipf": 1, "seed": 0} | changed
    with pytest.raises(ValueError, match=message):
        Settings(**given)


def test_errors_that_differ_only_in_numbers_share_a_kind() -> None:
    full = "the queue of 'm' holds {} examples"
    kinds = {
        kind_of_error(code, full.format(held))
        for code in ("429", "RESOURCE_EXHAUSTED")
        for held in (7, 12)
    }
    assert kinds == {"refused: the queue of 'm' holds N examples"}
    assert kind_of_error("400", "no row 5") == "400: no row N"


def test_statistics_rows_are_named_by_request_size() -> None:
    assert name_of("JSON", 1) == "JSON, 1 example"
    assert name_of("JSON", 50) == "JSON, 50 examples"


def test_building_requests_does_not_import_locust() -> None:
    script = "import sys, traffic; sys.exit('locust' in sys.modules or 'gevent' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=LOADTEST, timeout=60)
    assert done.returncode == 0
