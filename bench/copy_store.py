"""Copies a store between folders or through an S3 server on loopback, and kills the copies.

    make bench-copy COPY="--gigabytes 10 --kills 30 --rounds 2 --folder /tmp"
    make bench-copy COPY="--gigabytes 3 --s3"

The backup goes from a folder to a folder or to S3, and the restore back to another folder. Each is
timed in turns with cp or s3fs, so that other work on the machine meets both alike. Then copies are
killed (kill -9) at random moments and continued, until as many as asked for were killed. After
each kill the target must have a whole version or none. At the end every byte is compared, and
what else lies in the target is listed. Needs three times the size of the store on disk.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import s3fs
import torch

from embedserve_store import ModelStore, TableSpec, publish, verify

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from store.remote.s3_server import environment, serve_s3  # noqa: E402

TABLES = 5
DIMS = 64
MODEL = "m"
VERSION = 1
BUCKET = "bucket"
LARGE = f"{MODEL}/{VERSION}/tables.safetensors"
"""The file that s3fs alone transfers. The others are some kilobytes."""


@dataclass(frozen=True)
class Direction:
    """A copy, and the same bytes by another program.

    Attributes:
        files: the folder on disk with the files of the target.
        clean: removes all that lies in the target.
        rest: lists what lies in the target besides the version.
    """

    name: str
    source: str
    target: str
    files: Path
    peer_name: str
    peer: Callable[[], object]
    clean: Callable[[], object]
    rest: Callable[[], Sequence[str]]


def make_store(store: Path, gigabytes: float) -> None:
    """Publishes tables of different rows that share their memory."""
    rows = int(gigabytes * 1e9 / TABLES / DIMS / 4)
    shared = torch.rand(rows + TABLES, DIMS)
    names = [f"t{i}" for i in range(TABLES)]
    state = {f"embedding_bags.{name}.weight": shared[i : rows + i] for i, name in enumerate(names)}
    tables = [TableSpec(name, rows, DIMS, (name,), "sum", "float32") for name in names]
    publish(state, store, model=MODEL, tables=tables)


def start_copy(direction: Direction) -> subprocess.Popen[bytes]:
    command = ["-m", "embedserve", "copy", direction.source, direction.target, MODEL]
    return subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Waits for a copy, and raises RuntimeError if it failed."""
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"copy ended with {process.returncode}: {said.decode()[-500:]}")


def copy(direction: Direction) -> None:
    with start_copy(direction) as process:
        finish(process)


def large_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


def drop_cache(folder: Path) -> None:
    """Writes files of ``folder`` to disk, and drops them from memory."""
    sync_files(folder)
    for path in large_files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_files(folder: Path) -> None:
    for path in large_files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    sync_files(target)


def timed(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


def compare_rounds(direction: Direction, work: Path, rounds: int) -> float:
    """Times both programs in turns, prints the figures, and returns the longest of our copies."""
    size = sum(path.stat().st_size for path in large_files(work / "store"))
    ways = {direction.peer_name: direction.peer, "embedserve copy": lambda: copy(direction)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, act in ways.items():
            direction.clean()
            drop_cache(work)
            seconds[name].append(timed(act))
    for name, times in seconds.items():
        listed, median_s = ", ".join(f"{one:.1f}" for one in times), statistics.median(times)
        rate = f"{median_s:.1f} s, {size / median_s / 1e6:.0f} MB/s"
        print(f"{direction.name}: {name}: median {rate} ({listed} s)", flush=True)
    return max(seconds["embedserve copy"])


def has_version(direction: Direction) -> bool:
    if not direction.files.is_dir():
        return False
    store = ModelStore(direction.target)
    return MODEL in store.models() and store.versions(MODEL) == [VERSION]


def check_bytes(direction: Direction, store: Path) -> None:
    """Compares every file with the published one, and the rows with their checksums."""
    folder = store / MODEL / str(VERSION)
    for path in folder.iterdir():
        other = direction.files / MODEL / str(VERSION) / path.name
        subprocess.run(["cmp", str(path), str(other)], check=True)
    verify(ModelStore(direction.files).load(MODEL, VERSION))


def kill_and_continue(direction: Direction, store: Path, kills: int, longest_s: float) -> None:
    """Kills copies at moments of a whole one, continues them, and compares what has arrived.

    A version that is whole is compared and removed, so that the next copy begins anew. The time of
    a copy that ended is the longest that is waited from then on.
    """
    direction.clean()
    killed = whole = 0
    while killed < kills:
        start = time.monotonic()
        with start_copy(direction) as process:
            try:
                process.wait(random.uniform(0, longest_s))
            except subprocess.TimeoutExpired:
                process.kill()
                killed += 1
            else:
                finish(process)
                longest_s = time.monotonic() - start
        if has_version(direction):
            check_bytes(direction, store)
            direction.clean()
            whole += 1
    last_s = timed(lambda: copy(direction))
    check_bytes(direction, store)
    print(
        f"{direction.name}: killed {killed} times, {whole} times whole meanwhile; the last copy "
        f"took {last_s:.1f} s; every byte is as published; besides the version there "
        f"are: {', '.join(direction.rest()) or 'no files'}",
        flush=True,
    )


def hidden_files(folder: Path) -> list[str]:
    """Returns names that begin with a dot, without the store's history."""
    found = (str(path.relative_to(folder)) for path in folder.rglob(".*"))
    return sorted(name for name in found if not name.startswith(".history"))


def through_folder(work: Path) -> list[Direction]:
    store, backup, restored = work / "store", work / "backup", work / "restored"

    def between(name: str, source: Path, target: Path) -> Direction:
        return Direction(
            name,
            str(source),
            str(target),
            target,
            "cp and sync",
            lambda: cp(source, target),
            lambda: shutil.rmtree(target, ignore_errors=True),
            lambda: hidden_files(target),
        )

    return [between("backup", store, backup), between("restore", backup, restored)]


def through_s3(work: Path, served: Path) -> list[Direction]:
    store, restored, url = work / "store", work / "restored", f"s3://{BUCKET}/store"
    files = served / BUCKET / "store"
    objects = s3fs.S3FileSystem(use_listings_cache=False)
    objects.mkdir(BUCKET)

    def clean_bucket() -> None:
        if found := objects.find(BUCKET):
            objects.rm(found)

    def unfinished() -> list[str]:
        uploads = objects.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", [])
        return [*hidden_files(files), *(f"unfinished upload of {one['Key']}" for one in uploads)]

    def put() -> None:
        objects.put_file(str(store / LARGE), f"{BUCKET}/plain")

    def get() -> None:
        restored.mkdir()
        objects.get_file(f"{BUCKET}/store/{LARGE}", str(restored / "plain.safetensors"))
        sync_files(restored)

    def clean_folder() -> None:
        shutil.rmtree(restored, ignore_errors=True)

    def rest() -> list[str]:
        return hidden_files(restored)

    return [
        Direction("to S3", str(store), url, files, "s3fs", put, clean_bucket, unfinished),
        Direction("from S3", url, str(restored), restored, "s3fs", get, clean_folder, rest),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--s3", action="store_true", help="through an S3 server, not a folder")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        work, served = folder / "work", folder / "served"
        served.mkdir()
        make_store(work / "store", options.gigabytes)
        if options.s3:
            # By default rclone reads the whole object to answer a listing with its MD5.
            endpoint = stack.enter_context(serve_s3(served, "--etag-hash", ""))
            os.environ.update(environment(endpoint))
        for direction in through_s3(work, served) if options.s3 else through_folder(work):
            longest_s = compare_rounds(direction, work, options.rounds)
            kill_and_continue(direction, work / "store", options.kills, longest_s)


if __name__ == "__main__":
    main()
