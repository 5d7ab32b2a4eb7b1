"""Copies a store of 10 GB between folders and an S3 server on loopback, beside cp and s3fs alone.

    python bench/copy_store.py --gigabytes 10 --kills 30 --rounds 2 --folder /tmp

In turns, so that other work on the machine meets both alike. Then kills copies (kill -9) at random
moments, continues them, and verifies what arrived. Needs twice the size of the store on disk.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import s3fs
import torch

from embedserve_store import ModelStore, TableSpec, publish, verify

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from store.remote.s3_server import environment, serve_s3  # noqa: E402

TABLES = 5
DIMS = 64
KILL_S_MAX = 8.0
BUCKET = "bucket"
TABLES_FILE = "m/1/tables.safetensors"


def make_store(store: Path, gigabytes: float) -> None:
    """Publishes tables that share their rows, so that only one of them is in memory."""
    rows = int(gigabytes * 1e9 / TABLES / DIMS / 4)
    weights = torch.rand(rows, DIMS)
    names = [f"t{i}" for i in range(TABLES)]
    state = {f"embedding_bags.{name}.weight": weights for name in names}
    tables = [TableSpec(name, rows, DIMS, (name,), "sum", "float32") for name in names]
    publish(state, store, model="m", tables=tables)


def start_copy(source: str | Path, target: str | Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "embedserve", "copy", str(source), str(target), "m"]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def copy(source: str | Path, target: str | Path) -> None:
    with start_copy(source, target) as process:
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(f"copy ended with {process.returncode}: {said.decode()[-500:]}")


def drop_cache(folder: Path) -> None:
    """Writes files of ``folder`` to disk, and drops them from memory."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


def cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    for path in target.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def show(what: str, seconds: Mapping[str, list[float]], nbytes: int) -> None:
    for name, times in seconds.items():
        listed = ", ".join(f"{one:.1f}" for one in times)
        print(f"{what}: {name}: {listed} s; best {nbytes / min(times) / 1e6:.0f} MB/s", flush=True)


def kill_and_continue(source: str | Path, target: str | Path, kills: int) -> None:
    """Kills copies at random moments within KILL_S_MAX, then lets one end."""
    done = killed = 0
    for _ in range(kills):
        with start_copy(source, target) as process:
            time.sleep(random.uniform(0.5, KILL_S_MAX))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                killed += 1
            else:
                done += 1
    last_s = timed(lambda: copy(source, target))
    print(f"killed {killed} times, ended {done} times before; last run {last_s:.1f} s", flush=True)


def measure(work: Path, rounds: int, kills: int, is_s3_only: bool) -> None:
    store, target = work / "store", work / "target"
    size = (store / TABLES_FILE).stat().st_size
    url = f"s3://{BUCKET}/store"
    objects = s3fs.S3FileSystem(use_listings_cache=False)
    objects.mkdir(BUCKET)

    def put() -> None:
        objects.put_file(str(store / TABLES_FILE), f"{BUCKET}/plain")

    def get() -> None:
        objects.get_file(f"{BUCKET}/store/{TABLES_FILE}", str(target))

    def run(ways: Mapping[str, Callable[[], None]], clean: Callable[[], None], what: str) -> None:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, act in ways.items():
                clean()
                drop_cache(work)
                seconds[name].append(timed(act))
        show(what, seconds, size)

    def clean_target() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)

    def clean_bucket() -> None:
        if found := objects.find(BUCKET):
            objects.rm(found)

    if not is_s3_only:
        ways = {"cp": lambda: cp(store, target), "embedserve": lambda: copy(store, target)}
        run(ways, clean_target, "folder to folder")
        clean_target()
        kill_and_continue(store, target, kills)
        verify(ModelStore(target).load("m", 1))
        print("verified", os.listdir(target / "m"), flush=True)
        clean_target()
    run({"s3fs": put, "embedserve": lambda: copy(store, url)}, clean_bucket, "folder to S3")
    clean_bucket()
    kill_and_continue(store, url, kills)
    shutil.rmtree(store)
    run({"s3fs": get, "embedserve": lambda: copy(url, target)}, clean_target, "S3 to folder")
    verify(ModelStore(target).load("m", 1))
    print("verified what came back from S3", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--s3-only", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work, served = Path(folder) / "work", Path(folder) / "served"
        served.mkdir()
        make_store(work / "store", options.gigabytes)
        # By default rclone reads the whole object to answer a listing with its MD5.
        with serve_s3(served, "--etag-hash", "") as endpoint:
            os.environ.update(environment(endpoint))
            measure(work, options.rounds, options.kills, options.s3_only)


if __name__ == "__main__":
    main()
