"""Tests of the memory figures of the pages' examples, against the code that computes them."""

import re

import pytest
from documents import ROOT

from embedserve.batching.batcher import BATCHES_PER_REPLICA
from embedserve.commands.planning.pod_patch import PodOptions, PodRows, pod_figures
from embedserve.config import DEFAULT_LIMITS, ServeSettings
from embedserve.processes.memory_bounds import memory_by_purpose, server_memory
from embedserve_store.terminal.sizes import human_bytes

GIB = 1 << 30
SIZING = " ".join((ROOT / "docs" / "sizing.md").read_text("utf-8").split())
DEPLOYING = " ".join((ROOT / "deploy" / "README.md").read_text("utf-8").split())


def gib(count: int) -> str:
    return f"{count / GIB:.1f}"


def features(page: str, before: str) -> int:
    found = re.search(rf"{before}(\d+) features", page)
    assert found is not None
    return int(found[1])


def example(aliases: int = 1, hot: float = 1.0) -> tuple[str, str]:
    """Returns (request, limit) of a pod of the page's example, in GiB."""
    count = features(SIZING, "rows and ids and ")
    rows = PodRows("dlrm", 20 * GIB, aliases=aliases, features=count)
    figures = pod_figures(rows, PodOptions(workers=4, follow="alias", hot=hot))
    return gib(figures["requests"]["memory"]), gib(figures["limits"]["memory"])


def test_sizing_example_adds_up() -> None:
    request, limit = example()
    assert f"| **sum** of the exact figures | **{request} GiB** | **{limit} GiB** |" in SIZING
    settings = ServeSettings("", workers=4, follow="alias")
    memory = server_memory(settings, 0, features=features(SIZING, "rows and ids and "))
    assert f"| {gib(memory.processes)} GiB | {gib(memory.processes)} GiB |" in SIZING
    assert f" hold | {gib(memory.work)} GiB | {gib(memory.clients)} GiB |" in SIZING


@pytest.mark.parametrize(
    ("aliases", "hot", "words"),
    [(2, 1.0, "queues and batches. The sums are"), (1, 0.3, "`--hot-percent 30` gives")],
)
def test_sizing_example_covers_another_alias_or_fewer_hot_rows(
    aliases: int, hot: float, words: str
) -> None:
    request, limit = example(aliases, hot)
    assert re.search(rf"{words} {request} and {limit} GiB", SIZING)


def test_further_features_take_the_documented_memory() -> None:
    few, many = (
        sum(memory_by_purpose(DEFAULT_LIMITS, features=count).values()) for count in (100, 200)
    )
    assert f"Each further 100 features of a model take up to {(many - few) >> 20} MiB." in SIZING


def test_gpu_batch_takes_the_documented_memory() -> None:
    bytes_by_purpose = memory_by_purpose(DEFAULT_LIMITS, gpus=1)
    each = bytes_by_purpose["its batches that are looked up"] // BATCHES_PER_REPLICA
    assert f"two batches per GPU, {each >> 20} MiB each by the default limits" in SIZING


def test_example_overlay_takes_the_documented_memory() -> None:
    """The example has two workers that follow two aliases, with the component tls; rows are left
    out."""
    settings = ServeSettings("", workers=2, follow="alias", tls_cert="tls.crt")
    count = features(DEPLOYING, "a small model of ")
    memory = server_memory(settings, 0, features=count, names=2)
    assert memory.versions == 3
    assert f"a small model of {count} features take {human_bytes(memory.most)}:" in DEPLOYING
