"""Tests of the demo model: it learns from the bundled ratings, without leaks, and is published.

The full training runs once for this module and takes some seconds.
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedserve_store.demo import DemoReport, build_demo, save_checkpoint
from embedserve_store.demo.data import MovieTweetings, Ratings, load
from embedserve_store.demo.examples import FEATURES, histories, make_examples, split_by_time
from embedserve_store.demo.model import RatingModel, make_collection, to_kjt
from embedserve_store.demo.train import TrainingSettings, errors, predict, train
from embedserve_store.errors import StoreError

SHORT = TrainingSettings(epochs=1)


@dataclass(frozen=True)
class Built:
    report: DemoReport
    checkpoint: Path
    steps: list[tuple[int, int, float]]


@pytest.fixture(scope="module")
def data() -> MovieTweetings:
    return load()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("demo")
    steps: list[tuple[int, int, float]] = []
    report = build_demo(
        folder / "store",
        checkpoint=folder / "movies.pt",
        progress=lambda step, count, loss: steps.append((step, count, loss)),
    )
    return Built(report, folder / "movies.pt", steps)


@pytest.fixture(scope="module")
def trained_shortly(data: MovieTweetings) -> dict[str, torch.Tensor]:
    """Returns the tables after one epoch."""
    state: dict[str, torch.Tensor] = train(data, SHORT).model.state_dict()
    return state


def ratings(*rows: tuple[int, int, int]) -> MovieTweetings:
    """Returns a data set of (user, movie, unix_s), every rating 5, movies 0 to 9 without genres."""
    user, movie, unix_s = (np.array(column) for column in zip(*rows, strict=True))
    return MovieTweetings(
        ratings=Ratings(user, movie, np.full(len(rows), 5, np.float32), unix_s),
        movie_genres=((),) * 10,
        movie_rows={imdb_id: imdb_id for imdb_id in range(10)},
        genre_rows={},
        user_rows={user_id: user_id for user_id in range(10)},
    )


def test_import_does_not_import_torch() -> None:
    code = "import sys, embedserve_store.demo; sys.exit('torch' in sys.modules)"
    paths = [str(Path(entry).resolve()) for entry in sys.path if entry]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}; {code}"], check=True
    )


def test_data_set_has_the_sizes_stated_in_its_readme(data: MovieTweetings) -> None:
    assert len(data.ratings) == 7200
    assert len(data.user_rows) == 3060
    assert len(data.movie_rows) == len(data.movie_genres) == 31245
    assert np.all(np.diff(data.ratings.unix_s) >= 0)


def test_rows_are_numbered_in_id_order(data: MovieTweetings) -> None:
    assert list(data.movie_rows) == sorted(data.movie_rows)
    assert list(data.movie_rows.values()) == list(range(31245))
    assert list(data.genre_rows) == sorted(data.genre_rows)
    first = data.ratings  # user 37287 rated movie 2171847 with 6 at 1362062307
    assert first.user[0] == data.user_rows[37287]
    assert first.movie[0] == data.movie_rows[2171847]
    assert (first.rating[0], first.unix_s[0]) == (6, 1362062307)


def test_movies_have_their_genres(data: MovieTweetings) -> None:
    sneeze, no_genre = data.movie_rows[8], data.movie_rows[25]
    assert data.movie_genres[sneeze] == (data.genre_rows["Documentary"], data.genre_rows["Short"])
    assert data.movie_genres[no_genre] == ()


def test_license_notice_is_packaged_with_the_data() -> None:
    folder = files("embedserve_store.demo") / "data"
    notice = (folder / "LICENSE").read_text("utf-8")
    assert "Simon Dooms" in notice
    assert "Anoosheh Niavarani" in notice
    assert "MIT License" in (folder / "README.md").read_text("utf-8")


def test_history_holds_the_movies_rated_in_earlier_seconds() -> None:
    data = ratings((1, 7, 100), (2, 5, 110), (1, 3, 120), (1, 4, 120), (1, 9, 130))
    assert histories(data) == [(), (), (7,), (7,), (7, 3, 4)]


def test_held_out_ratings_are_the_latest_ratings(data: MovieTweetings) -> None:
    examples = make_examples(data)
    earlier, later = split_by_time(examples, 0.15)
    assert (len(earlier), len(later)) == (6120, 1080)
    assert np.array_equal(np.concatenate([earlier.rating, later.rating]), data.ratings.rating)
    assert later.bags["candidate"][0] == (data.ratings.movie[6120],)


def test_kjt_is_feature_major(data: MovieTweetings) -> None:
    examples = make_examples(data).take(np.arange(6000, 6050))
    by_feature = to_kjt(examples).to_dict()
    assert list(by_feature) == list(FEATURES)
    for feature in FEATURES:
        bags = [tuple(bag.tolist()) for bag in by_feature[feature].to_dense()]
        assert bags == examples.bags[feature]
    assert 0 < examples.bags["history"].count(()) < len(examples)


def test_prediction_follows_the_documented_formula(data: MovieTweetings) -> None:
    examples = make_examples(data).take(np.arange(6000, 6050))
    model = RatingModel(make_collection(data), 7.0)
    with torch.no_grad():
        pooled = {name: v.numpy() for name, v in model.ebc(to_kjt(examples)).to_dict().items()}
    history, candidate = pooled["history"][:, 0] * 32**0.5, pooled["candidate"][:, 0] * 32**0.5
    expected = 7.0 + 0.3 * history + candidate + 0.5 * history * candidate
    expected += pooled["candidate_genres"][:, 0] * 16**0.5 + pooled["user"][:, 0] * 64**0.5
    np.testing.assert_allclose(predict(model, examples), expected, rtol=1e-6)


def test_errors_are_rmse_and_mae() -> None:
    measured = errors(np.array([1, 4], np.float32), np.array([4, 8], np.float32))
    assert measured.rmse == pytest.approx(12.5**0.5)
    assert measured.mae == pytest.approx(3.5)


def test_training_is_deterministic_and_keeps_global_torch_state(
    data: MovieTweetings, trained_shortly: dict[str, torch.Tensor]
) -> None:
    torch.rand(1)  # changes the caller's random state
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    again = train(data, SHORT).model.state_dict()
    assert all(torch.equal(trained_shortly[name], again[name]) for name in trained_shortly)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_held_out_ratings_do_not_affect_the_tables(
    data: MovieTweetings, trained_shortly: dict[str, torch.Tensor]
) -> None:
    changed = data.ratings.rating.copy()
    changed[6120:] = 11 - changed[6120:]
    inverted = replace(data, ratings=replace(data.ratings, rating=changed))
    other = train(inverted, SHORT).model.state_dict()
    assert all(torch.equal(trained_shortly[name], other[name]) for name in trained_shortly)


def test_model_beats_a_constant_prediction_on_held_out_ratings(
    built: Built, data: MovieTweetings
) -> None:
    trained = built.report.trained
    rating = data.ratings.rating
    constant = errors(np.full(1080, rating[:6120].mean()), rating[6120:])
    assert (len(trained.train), len(trained.held_out)) == (6120, 1080)
    assert trained.constant_errors.rmse == pytest.approx(constant.rmse)
    assert trained.constant_errors.mae == pytest.approx(constant.mae)
    assert trained.errors.rmse < 0.93 * constant.rmse
    assert trained.errors.mae < 0.93 * constant.mae


def test_reported_error_matches_the_checkpoint(built: Built, data: MovieTweetings) -> None:
    model = RatingModel(make_collection(data), 0.0)
    model.load_state_dict(torch.load(built.checkpoint, weights_only=True))
    _, held_out = split_by_time(make_examples(data), 0.15)
    measured = errors(predict(model, held_out), held_out.rating)
    assert measured.rmse == pytest.approx(built.report.trained.errors.rmse, rel=1e-6)


def test_better_movies_have_higher_candidate_scores(built: Built) -> None:
    assert built.report.trained.candidate_correlation > 0.25


def test_nearest_movies_share_genres(built: Built, data: MovieTweetings) -> None:
    rows = torch.load(built.checkpoint, weights_only=True)["ebc.embedding_bags.movie.weight"]
    unit = torch.nn.functional.normalize(rows).numpy()
    genres = [set(some) for some in data.movie_genres]
    sampled_rows = np.random.default_rng(0).choice(
        [row for row, some in enumerate(genres) if some], 100
    )
    for row, near in zip(
        sampled_rows, np.argsort(-(unit[sampled_rows] @ unit.T), axis=1)[:, 1:6], strict=True
    ):
        shared = [len(genres[row] & genres[one]) / len(genres[row] | genres[one]) for one in near]
        assert np.mean(shared) > 0.5, (row, near)


def test_progress_is_reported_at_every_step(built: Built) -> None:
    steps = TrainingSettings().epochs * 24
    assert [step for step, _, _ in built.steps] == list(range(1, steps + 1))
    assert {count for _, count, _ in built.steps} == {steps}
    assert np.mean([loss for *_, loss in built.steps[-24:]]) < built.steps[0][2]


def test_report_describes_the_published_tables(built: Built) -> None:
    published = built.report.published
    tables = {table.name: table for table in published.manifest.tables}
    sizes = {name: (t.num_embeddings, t.embedding_dim, t.pooling) for name, t in tables.items()}
    assert sizes == {
        "movie": (31245, 32, "mean"),
        "genre": (28, 16, "mean"),
        "user": (3060, 64, "sum"),
    }
    assert tables["movie"].feature_names == ("history", "candidate")
    assert (published.path / "manifest.json").is_file()
    assert published.path.parts[-2:] == ("movies", "1")


def test_checkpoint_holds_the_published_rows(built: Built) -> None:
    from embedserve_store import ModelStore

    state = torch.load(built.checkpoint, weights_only=True)
    version = ModelStore(built.report.published.path.parents[1]).load("movies")
    for table in ("movie", "genre", "user"):
        weight = state[f"ebc.embedding_bags.{table}.weight"]
        stored = np.ascontiguousarray(version.tables.rows(table)).view(np.float32)
        assert np.array_equal(stored, weight.numpy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "no/x.pt"}, "no/x.pt: the checkpoint cannot be written: .*no does not exi"),
        ({"checkpoint": "file/x.pt"}, "file: cannot be written: .*file is not a folder"),
        ({"checkpoint": ""}, "the checkpoint cannot be written: it is a folder"),
        ({"store": "file"}, "file/movies: cannot be written"),
        ({"dtype": "int2"}, "table 'movie': dtype is 'int2'"),
        ({"sharding": "grid"}, "table 'movie': sharding is 'grid'"),
        ({"world_size": 0}, "world_size is 0"),
        ({"model": "a/b"}, "model name 'a/b'"),
    ],
)
def test_invalid_options_are_rejected_before_training(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    def trained(*_: object) -> None:
        pytest.fail("a step was trained")

    (tmp_path / "file").write_text("")
    paths = {k: tmp_path / v for k, v in options.items() if k in ("store", "checkpoint")}
    arguments: dict[str, Any] = {"store": tmp_path / "store", "progress": trained} | options | paths
    with pytest.raises(StoreError, match=message):
        build_demo(**arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class FailingModule(torch.nn.Module):
    """A module whose state dict raises an error of two lines, as torch's errors can be."""

    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("write failed\nat byte 7")


def test_failed_checkpoint_write_is_a_one_line_error(tmp_path: Path) -> None:
    message = r"x.pt: the checkpoint cannot be written: write failed at byte 7$"
    with pytest.raises(StoreError, match=message):
        save_checkpoint(FailingModule(), tmp_path / "x.pt")


def test_collection_alone_can_be_saved_as_a_checkpoint(
    tmp_path: Path, data: MovieTweetings
) -> None:
    collection = make_collection(data)
    save_checkpoint(collection, tmp_path / "ebc.pt")
    state = torch.load(tmp_path / "ebc.pt", weights_only=True)
    assert set(state) == {f"embedding_bags.{name}.weight" for name in ("movie", "genre", "user")}
