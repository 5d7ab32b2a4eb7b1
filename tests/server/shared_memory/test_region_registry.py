"""Tests of the region registry: owners of regions, their number, and their removal."""

from pathlib import Path

import pytest
from open_files import open_below

from embedserve.config import Limits
from embedserve.errors import (
    ConflictError,
    InvalidRequestError,
    RequestTooLargeError,
    UnknownRegionError,
)
from embedserve.shared_memory.region import closer
from embedserve.shared_memory.region_registry import EVERYBODY, RegionRegistry

FILES = ("a", "b", "c", "d", "e")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).write_bytes(bytes(100))
    return tmp_path


@pytest.fixture
def registry(folder: Path) -> RegionRegistry:
    limits = Limits(shared_memory_regions_max=4, shared_memory_bytes_max=300)
    return RegionRegistry("/", limits, str(folder))


def region_names(registry: RegionRegistry, owner: str = EVERYBODY) -> list[str]:
    return [one.name for one in registry.status(owner)]


def test_status_lists_registered_regions(registry: RegionRegistry) -> None:
    registry.register(EVERYBODY, "ids", "/a", 10, 20)
    registry.register(EVERYBODY, "vectors", "a", 30, 40)
    (one,) = registry.status(EVERYBODY, "vectors")
    assert (one.name, one.key, one.offset, one.byte_size) == ("vectors", "a", 30, 40)
    assert region_names(registry) == ["ids", "vectors"]
    assert list(registry.of(EVERYBODY)) == ["ids", "vectors"]
    registry.unregister(EVERYBODY, "ids")
    registry.unregister(EVERYBODY, "ids")
    assert region_names(registry) == ["vectors"]
    with pytest.raises(UnknownRegionError, match="region 'ids' is not registered"):
        registry.status(EVERYBODY, "ids")
    registry.register(EVERYBODY, "ids", "b", 0, 1)
    registry.unregister(EVERYBODY)
    registry.unregister(EVERYBODY)
    assert region_names(registry) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "a", 0, 1), "name has 0 characters, expected 1 to 256"),
        (("n" * 257, "a", 0, 1), "name has 257 characters, expected 1 to 256"),
        (("ids", "a", -1, 1), "offset is -1 and byte_size 1, expected 0 or more and 1 or more"),
        (("ids", "a", 0, 0), "offset is 0 and byte_size 0, expected 0 or more and 1 or more"),
        (("ids", "a", 1, 100), "offset and byte_size end at 101, but 'a' has 100 bytes"),
        (("ids", "../a", 0, 1), "key is '../a': it is no name of a file"),
    ],
)
def test_invalid_region_is_rejected(
    registry: RegionRegistry, arguments: tuple[str, str, int, int], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        registry.register(EVERYBODY, *arguments)
    assert region_names(registry) == []


def test_duplicate_region_name_is_rejected(registry: RegionRegistry) -> None:
    registry.register(EVERYBODY, "ids", "a", 0, 100)
    with pytest.raises(ConflictError, match="region 'ids' is registered already: unregister it"):
        registry.register(EVERYBODY, "ids", "b", 0, 100)
    assert registry.status(EVERYBODY)[0].key == "a"


def test_region_count_is_limited(registry: RegionRegistry) -> None:
    for name in FILES[:4]:
        registry.register(EVERYBODY, name, name, 0, 10)
    message = r"^4 regions .* all callers' limit is 4 \(--shared-memory-regions-max\)"
    with pytest.raises(ConflictError, match=message):
        registry.register(EVERYBODY, "e", "e", 0, 10)
    registry.unregister(EVERYBODY, "a")
    registry.register(EVERYBODY, "e", "e", 0, 10)


def test_region_bytes_are_limited(registry: RegionRegistry, folder: Path) -> None:
    (folder / "large").write_bytes(bytes(301))
    with pytest.raises(RequestTooLargeError, match=r"^byte_size is 301, all callers' limit is 300"):
        registry.register(EVERYBODY, "large", "large", 0, 301)
    for name in ("a", "b"):
        registry.register(EVERYBODY, name, name, 0, 100)
    message = r"^byte_size is 101, and 200 bytes are registered: all callers' limit is 300 \(--sh"
    with pytest.raises(ConflictError, match=message):
        registry.register(EVERYBODY, "large", "large", 0, 101)
    registry.register(EVERYBODY, "large", "large", 0, 100)


def test_regions_are_separate_by_owner(registry: RegionRegistry) -> None:
    registry.register("ranker", "ids", "a", 0, 100)
    assert region_names(registry, "other") == []
    assert list(registry.of("other")) == []
    with pytest.raises(UnknownRegionError):
        registry.status("other", "ids")
    registry.unregister("other", "ids")
    registry.unregister("other")
    with pytest.raises(ConflictError, match="key is '/a': another caller has registered its file"):
        registry.register("other", "mine", "/a", 0, 1)
    registry.register("other", "ids", "b", 0, 1)
    assert [one.key for one in registry.status("ranker")] == ["a"]
    assert [one.key for one in registry.status("other")] == ["b"]


def test_one_owner_may_use_half_of_the_limits(registry: RegionRegistry) -> None:
    registry.register("ranker", "a", "a", 0, 50)
    with pytest.raises(
        RequestTooLargeError, match=r"^byte_size is 151, this caller's limit is 150"
    ):
        registry.register("ranker", "b", "b", 0, 151)
    with pytest.raises(ConflictError, match="and 50 bytes are registered: this caller's limit is"):
        registry.register("ranker", "b", "b", 0, 101)
    registry.register("ranker", "b", "b", 0, 100)
    with pytest.raises(ConflictError, match=r"^2 regions .* this caller's limit is 2 "):
        registry.register("ranker", "c", "c", 0, 1)
    registry.register("other", "c", "c", 0, 1)
    registry.register("other", "d", "d", 0, 1)
    with pytest.raises(ConflictError, match=r"^4 regions .* all callers' limit is 4 "):
        registry.register("third", "e", "e", 0, 1)


@pytest.mark.parametrize(("regions_max", "of_one"), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_owner_share_of_an_odd_limit_is_rounded_up(
    folder: Path, regions_max: int, of_one: int
) -> None:
    registry = RegionRegistry("/", Limits(shared_memory_regions_max=regions_max), str(folder))
    for name in FILES[:of_one]:
        registry.register("ranker", name, name, 0, 1)
    with pytest.raises(
        ConflictError, match=rf"^{of_one} regions .* this caller's limit is {of_one} "
    ):
        registry.register("ranker", "e", "e", 0, 1)


def test_regions_of_removed_files_are_dropped(registry: RegionRegistry, folder: Path) -> None:
    registry.register(EVERYBODY, "ids", "a", 0, 100)
    registry.register(EVERYBODY, "vectors", "b", 0, 100)
    assert len(open_below(folder)) == 2
    (folder / "a").unlink()
    registry.drop_stale(None)
    assert list(registry.of(EVERYBODY)) == ["vectors"]
    (folder / "b").unlink()
    assert region_names(registry) == []
    closer.submit(int).result()
    assert not open_below(folder)
    registry.register(EVERYBODY, "ids", "c", 0, 100)
    (folder / "c").unlink()
    registry.register(EVERYBODY, "ids", "d", 0, 100)  # with the same name
    registry.close()
    closer.submit(int).result()
    assert not open_below(folder)


def test_regions_of_unauthorized_owners_are_dropped(registry: RegionRegistry) -> None:
    registry.register("ranker", "ids", "a", 0, 1)
    registry.register("other", "ids", "b", 0, 1)
    registry.drop_stale(lambda owner: owner == "other")
    assert (region_names(registry, "ranker"), region_names(registry, "other")) == ([], ["ids"])
    registry.register("other", "more", "a", 0, 1)
