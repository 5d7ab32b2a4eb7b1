"""Tests of `make swaps`: the comparison finds wrong responses; and a few swaps."""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import orjson
import pytest
from processes import descendants
from servers.triton import Triton
from swaps.embedserve_server import CODEC, EmbedserveServer
from swaps.server import Codec, Request, SwapServer, row_values
from swaps.swaps import Swaps, memory_mb, print_report
from swaps.triton_server import TritonServer

from embedserve_proto import embedding_pb2 as pb

ROWS = 500


def sums(request: Request, version: int) -> bytes:
    values = [
        row_values(version, table, ids).sum(0, dtype=np.float32)
        for table, ids in enumerate(request.ids)
    ]
    return np.concatenate(values).astype("<f4").tobytes()


def embedserve_answer(version: int, values: bytes) -> bytes:
    return pb.EmbedResponse(version=version, values=values, batch_size=1).SerializeToString()


def triton_answer(version: int, values: bytes) -> bytes:
    output = {
        "name": "values",
        "datatype": "FP32",
        "shape": [1, 1, len(values) // 4],
        "parameters": {"binary_data_size": len(values)},
    }
    head = {"model_name": "pooled", "model_version": str(version), "outputs": [output]}
    return orjson.dumps(head) + values


@pytest.mark.parametrize(
    ("codec", "answer"), [(CODEC, embedserve_answer), (TritonServer.rest, triton_answer)]
)
def test_responses_are_compared_with_the_version_that_they_name(
    codec: Codec, answer: Callable[[int, bytes], bytes]
) -> None:
    request = Request.of(Random(1), ROWS, codec)
    assert any(ids.size for ids in request.ids)
    for _ in range(2):
        assert request.version_of(answer(3, sums(request, 3))) == 3
        assert request.version_of(answer(3, sums(request, 4))) is None
        assert request.version_of(answer(4, sums(request, 4))) == 4


def test_memory_includes_descendants_started_by_any_thread() -> None:
    script = "import subprocess, threading\n" + (
        "run = lambda: subprocess.run(['sh', '-c', 'echo; read x; exit'])\n"
        "one = threading.Thread(target=run); one.start(); one.join()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert len(descendants(parent.pid)) == 2
        assert memory_mb(parent.pid) > 0
        parent.communicate(b"\n")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("server", "workers", "parts"),
    [
        (EmbedserveServer, 1, 0),
        (EmbedserveServer, 2, 0),
        (EmbedserveServer, 1, 2),
        (TritonServer, 1, 0),
    ],
)
def test_few_swaps_find_nothing_wrong(
    tmp_path: Path,
    server: Callable[[Path, argparse.Namespace], SwapServer],
    workers: int,
    parts: int,
) -> None:
    if shutil.which("wrk") is None:
        pytest.skip("wrk is not installed")
    if server is TritonServer and Triton().missing():
        pytest.skip("Triton is not installed")
    chosen = argparse.Namespace(
        rows=ROWS,
        workers=workers,
        parts=parts,
        replicas=2,
        row_cache=4 << 20,  # of the router of parts
        versions=3,
        swaps=6,
        every_s=0.5,
        seed=1,
        canary=0,
        cold=False,
        layouts=True,
    )
    swaps = Swaps(tmp_path, server(tmp_path, chosen), chosen)
    swaps.run()
    print_report(swaps)
    assert len(swaps.switches) == 6
    assert set(swaps.seen.answers) == {1, 2, 3}
    assert swaps.seen.wrong == []
    assert swaps.load["requests"] > 0
    assert (swaps.load["wrong"], swaps.load["errors"]) == (0, 0)
