"""Tests of .metadata: it is read as DCP writes it, and any other pickle is rejected without running
it."""

import pickle
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from store.sources.dcp_folder import edit_metadata, grid, save_alone, write_dcp, write_metadata
from store.sources.malicious import Marker
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from embedserve_store.errors import StoreError
from embedserve_store.sources.dcp_metadata import Chunk, Place, read_metadata

WEIGHT = torch.ones(6, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dcp(tmp_path / "checkpoint", {"m.weight": grid(WEIGHT, 4, 4)})


def test_metadata_written_by_dcp_is_read(tmp_path: Path) -> None:
    state = {"model": {"w": WEIGHT.half(), "b": torch.ones(3)}, "step": 3, "names": ["a", "b"]}
    save_alone(state, tmp_path)
    entries = read_metadata(tmp_path)
    assert sorted(entries) == ["model.b", "model.w", "names", "step"]
    weight = entries["model.w"]
    assert weight is not None
    assert (weight.dtype, weight.shape) == ("float16", (6, 4))
    assert [(chunk.offsets, chunk.sizes) for chunk in weight.chunks] == [((0, 0), (6, 4))]
    assert entries["step"] is None


def test_shards_and_their_offsets_are_read(folder: Path) -> None:
    weight = read_metadata(folder)["m.weight"]
    assert weight is not None
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert weight.chunks == (
        Chunk((0, 0), (4, 4), Place("__0_0.distcp", 0, sizes[0])),
        Chunk((4, 0), (2, 4), Place("__1_0.distcp", 0, sizes[1])),
    )


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_is_read_without_code_or_rejected(
    folder: Path, protocol: int
) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  just written
    expected = read_metadata(folder)
    write_metadata(folder, metadata, protocol)
    if protocol >= 2:
        assert read_metadata(folder) == expected
    else:
        with pytest.raises(StoreError, match=r"holds copy_reg\._reconstructor"):
            read_metadata(folder)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_the_metadata_is_rejected_and_not_executed(folder: Path, protocol: int) -> None:
    marker = folder.parent / "ran"
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  just written
    metadata.planner_data = {"x": Marker(marker)}
    write_metadata(folder, metadata, protocol)
    with pytest.raises(StoreError, match=r"\.metadata: refused: it holds ") as caught:
        read_metadata(folder)
    assert not marker.exists()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "os system",
        "builtins eval",
        "builtins getattr",
        "torch load",
        "torch.distributed.checkpoint.metadata os",
        "torch.distributed.checkpoint.metadata Metadata.__init__",
        "torch.serialization load",
        "pathlib Path",
        "copyreg __newobj__",
    ],
)
def test_names_outside_the_allowlist_are_never_resolved(folder: Path, name: str) -> None:
    module, attribute = name.split()
    code = f"c{module}\n{attribute}\n(S'touch x'\ntR.".encode()
    (folder / ".metadata").write_bytes(code)
    with pytest.raises(StoreError, match="refused: it holds"):
        read_metadata(folder)


def test_names_written_by_dcp_are_never_imported(folder: Path) -> None:
    """An allowed name becomes our own record, whatever arguments it is called with."""
    (folder / ".metadata").write_bytes(b"cpathlib\nPosixPath\n(S'a'\ntR.")
    with pytest.raises(StoreError, match="expected Metadata, found PosixPath"):
        read_metadata(folder)
    (folder / ".metadata").write_bytes(b"ctorch\nfloat32\n(S'a'\ntR.")
    with pytest.raises(StoreError, match="not what DCP writes, or damaged"):
        read_metadata(folder)


def test_damaged_metadata_file_is_rejected(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    for size in (0, 1, 50, len(whole) // 2, len(whole) - 1):
        (folder / ".metadata").write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"\.metadata: .*: \S") as caught:
            read_metadata(folder)
        assert "\n" not in str(caught.value)


def test_flipped_byte_yields_entries_or_a_store_error(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    rejected = 0
    for i in range(len(whole)):
        (folder / ".metadata").write_bytes(whole[:i] + bytes([whole[i] ^ 0x11]) + whole[i + 1 :])
        try:
            read_metadata(folder)
        except StoreError:
            rejected += 1
    assert rejected > len(whole) // 2


def _info(metadata: Metadata) -> _StorageInfo:
    info: _StorageInfo = next(iter(metadata.storage_data.values()))
    return info


def _outside(metadata: Metadata) -> None:
    _info(metadata).relative_path = "../secret"


def _absolute(metadata: Metadata) -> None:
    _info(metadata).relative_path = "/etc/passwd"


def _negative(metadata: Metadata) -> None:
    _info(metadata).offset = -1


def _compressed(metadata: Metadata) -> None:
    _info(metadata).transform_descriptors = ["stream.zstd/1"]


def _no_storage_data(metadata: Metadata) -> None:
    metadata.storage_data = None


def _numbered(metadata: Metadata) -> None:
    state: Any = metadata.state_dict_metadata
    state[7] = state["m.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_outside, r"m\.weight: lies in '\.\./secret', which is not a file of this folder"),
        (_absolute, r"m\.weight: lies in '/etc/passwd', which is not a file of this folder"),
        (_negative, r"expected sizes, found \(-1"),
        (_compressed, r"m\.weight: stored through \['stream\.zstd/1'\]"),
        (_numbered, "an entry is called 7"),
        (_no_storage_data, "expected a dict, found NoneType"),
    ],
)
def test_invalid_shard_offsets_are_rejected(folder: Path, change: Any, message: str) -> None:
    edit_metadata(folder, change)
    with pytest.raises(StoreError, match=rf"\.metadata: {message}"):
        read_metadata(folder)


def test_shards_listed_by_several_ranks_are_deduplicated(folder: Path) -> None:
    def repeat(metadata: Metadata) -> None:
        stored: Any = metadata.state_dict_metadata["m.weight"]
        stored.chunks += stored.chunks

    before = read_metadata(folder)
    edit_metadata(folder, repeat)
    assert read_metadata(folder) == before


def test_missing_metadata_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"\.metadata: cannot be read: No such file"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("put", [b"r" + (4_000_000_000).to_bytes(4, "little"), b"p30000000\n"])
def test_oversized_index_takes_no_memory(tmp_path: Path, put: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02N" + put + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match="expected Metadata, found NoneType"):
        read_metadata(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


NESTED = b")" + 300_000 * b"\x85"
"""A tuple of tuples, whose hash needs more stack than a thread has."""


@pytest.mark.parametrize(
    "code",
    [
        b"}" + NESTED + b"Ns",
        b"}(" + NESTED + b"Nu",
        b"(" + NESTED + b"Nd",
        b"\x8f(" + NESTED + b"\x90",
        b"(" + NESTED + b"\x91",
    ],
)
def test_nested_keys_are_rejected_before_they_are_hashed(tmp_path: Path, code: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + code + b".")
    with pytest.raises(StoreError, match=r"a key is a tuple|not what DCP writes, or damaged"):
        read_metadata(tmp_path)


def _nested_key(metadata: Metadata) -> None:
    object.__setattr__(next(iter(metadata.storage_data)), "fqn", 0.5)


def _nested_dtype(metadata: Metadata) -> None:
    stored: Any = metadata.state_dict_metadata["m.weight"]
    stored.properties.dtype = 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [(_nested_key, "a key is a tuple"), (_nested_dtype, "not what DCP writes, or damaged")],
)
def test_nested_fields_are_rejected_before_they_are_hashed(
    folder: Path, change: Any, message: str
) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  just written
    change(metadata)
    data = pickle.dumps(metadata, 2)
    number = pickle.BINFLOAT + struct.pack(">d", 0.5)
    assert number in data
    (folder / ".metadata").write_bytes(data.replace(number, NESTED))
    with pytest.raises(StoreError, match=message):
        read_metadata(folder)
