"""Publishes and serves one large table: seconds, rates, and memory of each process.

Creates a checkpoint of one float32 table (10 GB by default), publishes it from the command line in
two dtypes, and serves it with two servers. Measures the disk and the quantizer alone in the same
run. Private memory is from /proc/PID/smaps_rollup (Private_Clean and Private_Dirty), sampled 5
times a second. Needs three times the table on disk and none of it in memory. Prints a table and
writes JSON. Run it with `make bench-large`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from processes import memory_bytes
from running_servers import command, running

DIM = 128
BLOCK_ROWS = 1 << 16
PAGE_BYTES = 4096
IDS_PER_REQUEST = 125_000
SAMPLE_S = 0.2
DESCRIPTION = """tables:
  - name: large
    num_embeddings: {rows}
    embedding_dim: {dim}
    feature_names: [item]
    pooling: sum
"""


def main() -> None:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="embedserve-large-", dir=options.folder))
    try:
        result = measure(folder, options.gigabytes)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of the float32 table (10^9)")
    parser.add_argument("--folder", type=Path, default=None, help="where to put the files")
    parser.add_argument("--output", type=Path, default=None, help="a JSON file for the figures")
    return parser.parse_args()


def measure(folder: Path, gigabytes: float) -> dict[str, object]:
    rows = int(gigabytes * 1e9 / (4 * DIM))
    table_bytes = rows * DIM * 4
    _make_checkpoint(folder, rows)
    (folder / "tables.yaml").write_text(DESCRIPTION.format(rows=rows, dim=DIM))
    result: dict[str, object] = {"table_gb": table_bytes / 1e9, "rows": rows, "dim": DIM}
    result["copy_mb_s"] = _copy_rate(folder)
    result["sha256_mb_s"] = _hash_rate()
    result["int8_quantize_mb_s"] = _quantize_rate()
    start_s = _start_seconds(folder)
    result["publish_start_seconds"] = start_s
    for dtype in ("int8", "float32"):
        result[f"publish_{dtype}"] = _publish(folder / "checkpoint", dtype, table_bytes, start_s)
    result["serve"] = _serve(folder, "float32", rows)
    return result


def _make_checkpoint(folder: Path, rows: int) -> None:
    """Creates a DCP checkpoint of a model with the table, from a mapped file rather than from
    memory."""
    import torch
    import torch.distributed.checkpoint as dcp

    raw = folder / "raw"
    weights = np.memmap(raw, np.float32, "w+", shape=(rows, DIM))
    random = np.random.default_rng(1)
    block = random.uniform(-0.05, 0.05, (BLOCK_ROWS, DIM)).astype(np.float32)
    for start in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - start)
        weights[start : start + count] = block[:count]
        weights[start : start + count, 0] = np.arange(start, start + count) * 1e-9
    weights.flush()
    state = {"model": {"ebc.embedding_bags.large.weight": torch.from_numpy(weights)}}
    dcp.save(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    del weights, state
    raw.unlink()


def _copy_rate(folder: Path) -> float:
    """Returns MB/s of copying the checkpoint's file with fsync: the least that any copy takes."""
    (source,) = (folder / "checkpoint").glob("*.distcp")
    target = folder / "copy"
    start = time.perf_counter()
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 8 << 20)
        writer.flush()
        os.fsync(writer.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return source.stat().st_size / seconds / 1e6


def _quantize_rate() -> float:
    """Returns MB/s of float32 that FBGEMM's int8 quantize op processes on one thread."""
    import fbgemm_gpu  # noqa: F401
    import torch

    torch.set_num_threads(1)
    block = torch.rand(BLOCK_ROWS, DIM)
    quantize = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf
    quantize(block, 8)
    start = time.perf_counter()
    for _ in range(20):
        quantize(block, 8)
    return 20 * block.nbytes / (time.perf_counter() - start) / 1e6


def _hash_rate() -> float:
    """Returns MB/s of SHA-256 on one thread; publishing hashes every stored byte."""
    block = bytes(8 << 20)
    digest = hashlib.sha256()
    start = time.perf_counter()
    for _ in range(50):
        digest.update(block)
    return 50 * len(block) / (time.perf_counter() - start) / 1e6


def _start_seconds(folder: Path) -> float:
    """Returns the seconds of publishing a table of 4 KB: mostly the import of PyTorch and
    TorchRec."""
    small = folder / "small"
    small.mkdir()
    _make_checkpoint(small, 8)
    (small / "tables.yaml").write_text(DESCRIPTION.format(rows=8, dim=DIM))
    return _publish(small / "checkpoint", "float32", 4096, 0.0)["seconds"]


def _publish(checkpoint: Path, dtype: str, table_bytes: int, start_s: float) -> dict[str, float]:
    """Runs `embedserve publish` in a separate process.

    Returns the seconds, the MB/s of float32 rows without its start, and the peak of private MB.
    """
    folder = checkpoint.parent
    words = command("publish", checkpoint, folder / "tables.yaml", folder / dtype)
    start = time.perf_counter()
    process = subprocess.Popen(
        [*words, "--model", "large", "--dtype", dtype], stdout=subprocess.DEVNULL
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid)[0])
        time.sleep(SAMPLE_S)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"publish failed with status {process.returncode}")
    return {
        "seconds": seconds,
        "mb_s": table_bytes / (seconds - start_s) / 1e6,
        "peak_private_mb": peak / 1e6,
    }


def _serve(folder: Path, dtype: str, rows: int) -> dict[str, object]:
    """Runs two servers on the same version, and reads every page of the table through each.

    Returns the seconds until each is ready, and the memory of each. The proportional set sizes add
    up to the table once.
    """
    servers, ready_s = [], []
    with ExitStack() as stack:
        for number in range(2):
            start, log = time.perf_counter(), folder / f"server-{number}.log"
            servers.append(stack.enter_context(running(folder / dtype, log, is_warm=False)))
            ready_s.append(time.perf_counter() - start)
            _read_every_page(servers[-1].http, rows)
        memory = [_memory(server.process.pid) for server in servers]
    return {
        "seconds_to_ready": ready_s[0],
        "second_seconds_to_ready": ready_s[1],
        "private_mb": [private / 1e6 for private, _ in memory],
        "pss_mb": [pss / 1e6 for _, pss in memory],
    }


def _read_every_page(url: str, rows: int) -> None:
    """Requests one row in each 4 KiB page, with a million bytes of ids per request."""
    from embedserve_client import EmbedClient

    ids = np.arange(0, rows, PAGE_BYTES // (4 * DIM))
    with EmbedClient(url) as client:
        for start in range(0, len(ids), IDS_PER_REQUEST):
            part = ids[start : start + IDS_PER_REQUEST]
            client.embed({"item": (part, np.array([len(part)]))})


def _memory(pid: int) -> tuple[int, int]:
    """Returns (private bytes, proportional set size in bytes); zeros for a process that has just
    ended."""
    try:
        sizes = memory_bytes(pid)
    except OSError:
        return 0, 0
    return sizes["Private_Clean"] + sizes["Private_Dirty"], sizes["Pss"]


if __name__ == "__main__":
    main()
