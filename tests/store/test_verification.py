"""Tests of verification: it finds a flipped bit in every file of a version, in headers and in
padding."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torchrec import EmbeddingBagCollection
from writable import writable

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.publish import publish
from embedserve_store.verification import verify

HEADER_BYTES = 4096
FLIPS = 250


@pytest.fixture
def folder(ebc: EmbeddingBagCollection, tmp_path: Path) -> Path:
    """Returns a version with every kind of file: two dtypes, several pages of rows, a
    vocabulary."""
    published = publish(
        ebc,
        tmp_path / "store",
        model="m",
        dtype={"user": "float32", "item": "int8", "tag": "int8"},
        vocabularies={"user": list(range(1000, 1300))},
    )
    return writable(published.path)


def check(folder: Path) -> None:
    verify(LocalStore(folder.parent.parent).load("m", int(folder.name)))


def flips(path: Path, positions: Iterator[int]) -> Iterator[int]:
    """Flips one bit of ``path`` at each of ``positions`` in turn, and restores it."""
    data = path.read_bytes()
    for position in positions:
        changed = bytearray(data)
        changed[position] ^= 1 << random.Random(position).randrange(8)
        path.write_bytes(changed)
        yield position
    path.write_bytes(data)


def is_damage_detected(folder: Path) -> bool:
    try:
        check(folder)
    except StoreError as error:
        return "\n" not in str(error)
    return False


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "plan.json", "goldens.safetensors", "tables.safetensors", "ids.safetensors"],
)
def test_flipped_bit_is_detected_in_every_file(folder: Path, name: str) -> None:
    path = folder / name
    size = path.stat().st_size
    sampled = sorted(random.Random(1).sample(range(size), min(FLIPS, size)))
    missed = [byte for byte in flips(path, iter(sampled)) if not is_damage_detected(folder)]
    assert missed == []
    check(folder)


@pytest.mark.parametrize("name", ["tables.safetensors", "ids.safetensors"])
def test_flipped_bit_is_detected_in_header_padding(folder: Path, name: str) -> None:
    path = folder / name
    padding = len(path.read_bytes()[:HEADER_BYTES].rstrip(b" "))
    assert padding < HEADER_BYTES
    positions = iter((padding, (padding + HEADER_BYTES) // 2, HEADER_BYTES - 1))
    assert [byte for byte in flips(path, positions) if not is_damage_detected(folder)] == []


def test_tabs_in_place_of_header_spaces_are_detected(folder: Path) -> None:
    path = folder / "tables.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: HEADER_BYTES - 1] + b"\t" + data[HEADER_BYTES:])
    loaded = LocalStore(folder.parent.parent).load("m")
    with pytest.raises(StoreError, match=r"tables\.safetensors: its header is not as it was"):
        verify(loaded)


def test_newer_manifest_without_its_seal_is_rejected(folder: Path) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_bytes())
    del data["sha256"]
    path.write_text(json.dumps(data))
    with pytest.raises(StoreError, match=r"manifest\.json: sha256 is None"):
        check(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("manifest.json", lambda text: text.replace(b'"user"', b'"uses"')),
        ("manifest.json", lambda text: text[:-9]),
        ("manifest.json", lambda text: b"[]"),
        ("plan.json", lambda text: b"{}"),
    ],
)
def test_changes_after_loading_are_detected(
    folder: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    loaded = LocalStore(folder.parent.parent).load("m")
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StoreError, match=f"{name}: (sha256|not JSON|expected a JSON object)"):
        verify(loaded)


def test_another_manifest_with_a_valid_seal_is_detected(folder: Path) -> None:
    loaded = LocalStore(folder.parent.parent).load("m")
    other = replace(loaded.manifest, source={"by": "another"})
    (folder / "manifest.json").write_bytes(sealed_json(other.to_json()))
    with pytest.raises(StoreError, match=r"manifest\.json: is another manifest than the one that"):
        verify(loaded)


def test_progress_reaches_the_total_rows_and_bytes(folder: Path) -> None:
    loaded = LocalStore(folder.parent.parent).load("m")
    calls: list[tuple[str, int, int, int]] = []
    verify(loaded, lambda *call: calls.append(call))
    assert {call[0]: call[1:3] for call in calls} == {
        "user": (300, 300),
        "item": (77, 77),
        "tag": (16, 16),
    }
    assert calls[-1][3] == loaded.manifest.nbytes


def test_changed_row_is_detected_by_verify(version: ModelVersion) -> None:
    path = version.path / "tables.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    loaded = LocalStore(version.path.parent.parent).load("m")
    last = max(loaded.tables.offsets, key=loaded.tables.offsets.__getitem__)
    with pytest.raises(StoreError, match=rf"tables\.safetensors: table '{last}': sha256 is "):
        verify(loaded)
