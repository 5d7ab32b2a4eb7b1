"""Tests of files in /dev/shm: which process owns which, for how long, and that none is left."""

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from embedserve_client import InvalidRequest
from embedserve_client.shm.regions import LENT_MAX, REGION_BYTES_MIN, Region, Regions

PREFIX = f"/embedserve-test-regions-{os.getpid()}-"
FLOAT32 = np.dtype("<f4")
CLOSE_S_MAX = 60


@pytest.fixture
def regions() -> Iterator[Regions]:
    regions = Regions(PREFIX)
    yield regions
    regions.close()
    assert files() == []


def files() -> list[Path]:
    return list(Path("/dev/shm").glob(f"{PREFIX[1:]}*"))


def take_region(regions: Regions, nbytes: int = 1) -> Region:
    region = regions.take(nbytes)
    assert region is not None
    return region


def test_region_serves_one_request_at_a_time(regions: Regions) -> None:
    first, second = take_region(regions), take_region(regions)

    assert first is not second
    regions.give_back(first)
    assert take_region(regions) is first
    assert {path.name for path in files()} == {first.name, second.name}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files())


def test_written_arrays_are_in_the_file(regions: Regions) -> None:
    region = take_region(regions)

    end = region.write(3, np.arange(4, dtype="<i8"))

    data = Path(region.path).read_bytes()
    assert (len(data), end) == (region.nbytes, 3 + 32)
    assert np.array_equal(np.frombuffer(data[3:end], "<i8"), np.arange(4))
    assert region.write(end, np.zeros(0, "<i8")) == end


def test_region_sizes_are_powers_of_two_and_larger_regions_replace_smaller(
    regions: Regions,
) -> None:
    small = take_region(regions)
    regions.give_back(small)
    large = take_region(regions, 3 * REGION_BYTES_MIN)
    regions.give_back(large)

    assert (small.nbytes, large.nbytes) == (REGION_BYTES_MIN, 4 * REGION_BYTES_MIN)
    assert [path.name for path in files()] == [large.name]
    assert take_region(regions, 2 * REGION_BYTES_MIN) is large


def test_region_stays_lent_while_a_view_of_its_vectors_exists(regions: Regions) -> None:
    region = take_region(regions)
    region.write(64, np.arange(6, dtype=FLOAT32))

    column = regions.lend(region, 64, (2, 3), FLOAT32)[:, 1]

    assert column.tolist() == [1.0, 4.0]
    assert not column.flags.writeable
    assert take_region(regions) is not region
    del column
    gc.collect()
    assert take_region(regions) is region


def test_results_beyond_the_lending_limit_are_copied(regions: Regions) -> None:
    held = []
    for number in range(LENT_MAX + 3):
        region = take_region(regions)
        region.write(0, np.full(2, number, FLOAT32))
        held.append(regions.lend(region, 0, (1, 2), FLOAT32))

    assert [one[0, 0] for one in held] == list(range(LENT_MAX + 3))
    assert not any(one.flags.writeable for one in held)
    assert len(files()) == LENT_MAX + 1


def test_dropped_region_is_unlinked_and_never_reused(regions: Regions) -> None:
    region = take_region(regions)

    regions.drop(region)

    assert files() == []
    regions.give_back(region)
    assert take_region(regions) is not region


def test_lent_vectors_outlive_their_file() -> None:
    regions = Regions(PREFIX)
    region = take_region(regions)
    region.write(0, np.ones(4, FLOAT32))
    values = regions.lend(region, 0, (2, 2), FLOAT32)

    regions.close()

    assert files() == []
    assert regions.take(1) is None
    assert values.sum() == 4


def test_garbage_collected_regions_leave_no_files() -> None:
    regions = Regions(PREFIX)
    take_region(regions)
    assert len(files()) == 1

    del regions
    gc.collect()

    assert files() == []


def test_forked_process_gets_its_own_region(regions: Regions) -> None:
    parent_region = take_region(regions)
    regions.give_back(parent_region)

    child = os.fork()
    if not child:
        own = regions.take(1)
        regions.close()
        os._exit(own is not None and own is not parent_region and not os.path.exists(own.path))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert [path.name for path in files()] == [parent_region.name]
    assert take_region(regions) is parent_region


def test_pool_closes_in_a_process_that_was_forked_while_a_thread_used_it(regions: Regions) -> None:
    with regions._lock:
        child = os.fork()
        if not child:
            signal.alarm(CLOSE_S_MAX)
            regions.close()
            os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_files_of_a_killed_process_are_removed_by_the_next_process(regions: Regions) -> None:
    own = take_region(regions)
    child = os.fork()
    if not child:
        regions.take(1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(files()) == 2

    next_regions = Regions(PREFIX)
    next_region = take_region(next_regions)

    assert {path.name for path in files()} == {own.name, next_region.name}
    next_regions.close()


def test_threads_never_share_a_region(regions: Regions) -> None:
    def use(number: int) -> bool:
        region = take_region(regions)
        region.write(0, np.full(1000, number, "<i8"))
        is_own = bool((region.array(0, 1000, np.dtype("<i8")) == number).all())
        regions.give_back(region)
        return is_own

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(400)))
    assert len(files()) <= 8


def test_no_region_is_returned_if_shared_memory_is_full(regions: Regions) -> None:
    assert regions.take(1 << 50) is None


@pytest.mark.parametrize("prefix", ["", "ranker-", "/a/b", 7])
def test_invalid_prefix_is_rejected(prefix: str) -> None:
    with pytest.raises(ValueError, match="is no slash and what names begin with"):
        Regions(prefix)


def test_file_creation_failure_raises_invalid_request() -> None:
    regions = Regions("/" + 300 * "x")

    with pytest.raises(InvalidRequest, match="cannot be made: File name too long") as caught:
        regions.take(1)

    assert caught.value.field == "shared_memory"
