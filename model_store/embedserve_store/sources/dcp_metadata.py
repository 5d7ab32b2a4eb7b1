"""Reads the tensors, chunks and positions in .metadata of torch.distributed.checkpoint.

The file is a pickle, which torch reads with plain pickle.load. Here, the classes that DCP writes
become inert records, and any other name is rejected. Nothing of torch, of the standard library or
of the file's author is ever called. Never imports torch, never opens another file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from embedserve_store.errors import StoreError, reading

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = frozenset(
    [
        *(
            (f"{_DCP}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"),  # before torch 2.3
        (_SHARDED_TENSOR, "TensorProperties"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    ]
)
_DTYPES = frozenset(
    [
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
        *("complex128", "complex64", "complex32"),
        *("quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
    ]
)

_LOADS: dict[int, Any] = pickle._Unpickler.dispatch
_UNCHECKED = pickle.DICT + pickle.ADDITEMS + pickle.FROZENSET
"""Opcodes that hash objects, and that DCP does not write."""


@dataclass(frozen=True)
class Place:
    """Position of a chunk: a byte range in a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A rectangular chunk of a tensor of any rank."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place | None
    """Position of the chunk; None if the checkpoint does not record it."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint. Chunks that several ranks hold are listed once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class _Record:
    """Inert stand-in for a pickled object: holds its state alone, has no behaviour."""

    state: Any = None

    def __init__(self, *_args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Unpickles to records, tuples and dtype names, and rejects every other name.

    This is pickle's implementation in Python. The one in C ends the process if a key is a
    tuple nested 300,000 times, and allocates whatever memo a file names.
    """

    stack: list[Any]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.records: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return name
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) in _RECORDS:
            return self.records.setdefault((module, name), type(name, (_Record,), {}))
        raise StoreError(f"refused: it holds {module}.{name}, which DCP does not write there")

    def _load_item(self) -> None:
        _check_keys(self.stack[-2:-1])
        _LOADS[pickle.SETITEM[0]](self)

    def _load_items(self) -> None:
        _check_keys(self.stack[::2])
        _LOADS[pickle.SETITEMS[0]](self)

    dispatch: ClassVar[dict[int, Any]] = {
        **{opcode: load for opcode, load in _LOADS.items() if opcode not in _UNCHECKED},
        pickle.SETITEM[0]: _load_item,
        pickle.SETITEMS[0]: _load_items,
    }


def _check_keys(keys: list[Any]) -> None:
    """Raises StoreError for a key that DCP does not write."""
    for key in keys:
        if not isinstance(key, str | int | _Record):
            raise StoreError(f"a key is a {type(key).__name__}")


def read_metadata(folder: Path) -> dict[str, StoredTensor | None]:
    """Returns every entry of a checkpoint by full key; None for an entry that is not a tensor.

    Raises:
        StoreError: there is no .metadata, it holds code, or DCP did not write it.
    """
    path = folder / METADATA
    with reading(path):
        data = path.read_bytes()
    try:
        root = _Unpickler(io.BytesIO(data)).load()
        return dict(_entries(_fields(root, "Metadata")))
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StoreError(f"{path}: not what DCP writes, or damaged: {reason:.200}") from error


def _entries(metadata: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor | None]]:
    places = {}
    for index, info in _mapping(metadata["storage_data"]).items():
        at = _fields(index, "MetadataIndex")
        offset = at.get("offset")
        _check_keys([at["fqn"]])
        places[at["fqn"], None if offset is None else _numbers(offset)] = info
    for key, stored in _mapping(metadata["state_dict_metadata"]).items():
        if not isinstance(key, str):
            raise StoreError(f"an entry is called {key!r:.60}")
        is_tensor = type(stored).__name__ == "TensorStorageMetadata"
        yield (
            key,
            _tensor(key, _fields(stored, "TensorStorageMetadata"), places) if is_tensor else None,
        )


def _tensor(key: str, fields: Mapping[str, Any], places: Mapping[Any, Any]) -> StoredTensor:
    properties = fields["properties"]
    dtype = properties.state[0] if isinstance(properties, _Record) else None
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise StoreError(f"{key}: its dtype is {dtype!r:.60}")
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], Chunk] = {}
    for item in fields["chunks"]:
        chunk = _fields(item, "ChunkStorageMetadata")
        offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
        info = places.get((key, offsets))
        place = None if info is None else _place(key, _fields(info, "_StorageInfo"))
        chunks[offsets, sizes] = Chunk(offsets, sizes, place)
    return StoredTensor(dtype, _numbers(fields["size"]), tuple(chunks.values()))


def _place(key: str, info: Mapping[str, Any]) -> Place:
    if info.get("transform_descriptors"):
        raise StoreError(f"{key}: stored through {info['transform_descriptors']!r:.60}")
    file = info["relative_path"]
    offset, length = _numbers((info["offset"], info["length"]))
    if not isinstance(file, str) or PurePosixPath(file).name != file:
        raise StoreError(f"{key}: lies in {file!r:.60}, which is not a file of this folder")
    return Place(file, offset, length)


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise StoreError(f"expected {kind}, found {type(record).__name__}")
    return _mapping(record.state)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise StoreError(f"expected a dict, found {type(value).__name__}")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(v) is int and v >= 0 for v in values):
        raise StoreError(f"expected sizes, found {values!r:.60}")
    return values
