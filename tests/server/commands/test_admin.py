"""Tests of `embedserve admin`: the arguments of an action, and the output about deltas."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from server.fake_admin import FakeAdmin
from server.fake_deltas import at_seq
from server.fake_engine import FakeEngine, model_info
from server.live import make_pipeline
from server.raw_http import OurServer
from typer.testing import CliRunner

from embedserve.api import delta_hold
from embedserve.api.management import management_app
from embedserve.commands.admin import parse_action
from embedserve.commands.cli import app
from embedserve.deltas.status import SharedDeltaState

ACTIONS = "expected load, unload, reload, deltas hold or deltas go-on"


@pytest.mark.parametrize(
    ("words", "action", "model"),
    [
        ("load m@3", "load", "m@3"),
        ("unload m", "unload", "m"),
        ("reload", "reload", ""),
        ("deltas hold m", "deltas hold", "m"),
        ("deltas go-on m@1", "deltas go-on", "m@1"),
        ("load deltas", "load", "deltas"),
    ],
)
def test_actions_are_parsed_from_words(words: str, action: str, model: str) -> None:
    assert parse_action(words.split()) == (action, model)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("hold m", f"action is 'hold', {ACTIONS}"),
        ("deltas", f"action is 'deltas', {ACTIONS}"),
        ("deltas m hold", f"action is 'deltas m', {ACTIONS}"),
        ("deltas hold", "deltas hold takes the name of a model"),
        ("deltas go-on a b", "deltas go-on takes one model, not a b"),
        ("load", "load takes the name of a model"),
        ("unload a b c", "unload takes one model, not a b c"),
        ("reload m", "reload takes no model"),
    ],
)
def test_invalid_actions_are_rejected(words: str, message: str) -> None:
    done = CliRunner().invoke(app, ["admin", "localhost:1", *words.split()])
    assert (done.exit_code, done.output) == (1, f"embedserve: {message}\n")


@contextmanager
def polling(followed: SharedDeltaState) -> Iterator[None]:
    """Runs a thread that stands for the applier."""
    is_done = threading.Event()

    def poll() -> None:
        while not is_done.wait(0.005):
            now = followed.status.read()
            state = "held" if followed.hold.is_set else "following"
            applied = replace(now.applied, seq=5)
            followed.status.write(replace(now, state=state, applied=applied, looked_at=time.time()))

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


async def test_deltas_are_held_and_resumed(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = at_seq(model_info(), 5)
    assert shop.deltas is not None
    films = FakeEngine(model_info("films", {"user": (7, 2)}))
    pipeline = make_pipeline(FakeEngine(shop), films, executor=executor)
    monkeypatch.setattr(delta_hold, "EFFECT_S_MAX", 3600.0)  # more than a test may take
    async with OurServer(pipeline, management=management_app(pipeline, FakeAdmin())) as server:

        async def run_admin(*words: str) -> tuple[int, str]:
            arguments: list[Any] = ["admin", f"127.0.0.1:{server.port}", *words]
            done = await asyncio.to_thread(CliRunner().invoke, app, arguments)
            return done.exit_code, done.output

        with polling(shop.deltas):
            assert await run_admin("deltas", "hold", "shop") == (0, "shop: held at seq 5\n")
            assert await run_admin("deltas", "go-on", "shop@7") == (0, "shop: following at seq 5\n")
            for model, problem in (
                ("shoes", "answered 404: model is 'shoes': this server has shop, films"),
                ("films", "answered 400: model is 'films', which follows no deltas (serve --del"),
            ):
                status, output = await run_admin("deltas", "hold", model)
                assert (status, f": /admin/deltas/hold: {problem}" in output) == (1, True), output
        reloading = "the server polls its store now, see /models\n"
        assert await run_admin("reload") == (0, reloading)
        monkeypatch.setattr(delta_hold, "EFFECT_S_MAX", 0.05)
        late = "; the process that applies deltas has not responded yet, see /models\n"
        status, output = await run_admin("deltas", "hold", "shop")
        assert (status, output) == (0, f"shop: following at seq 5{late}")
    status, output = await run_admin("deltas", "hold", "shop")
    assert status == 1
