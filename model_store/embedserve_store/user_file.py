"""Parses YAML and JSON files that users write, such as constraints.

Rejects a large file, such as a checkpoint passed by mistake, without reading it whole. Imports
yaml, and is therefore imported only where such a file is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from embedserve_store.errors import InvalidModelError, StoreError

TEXT_BYTES_MAX = 16 << 20
_MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key ``<<``, whose mappings the author may override, and which may occur again."""
_VALUE = "tag:yaml.org,2002:value"
"""Tag of the key ``=``, which a mapping has as text."""


def parse_user_file(path: Path) -> tuple[str, Any]:
    """Returns the text of ``path`` and the parsed value, from a .json file as JSON, else from YAML.

    Raises:
        StoreError: the file cannot be read.
        InvalidModelError: the file is larger than TEXT_BYTES_MAX (16 MiB), is no UTF-8 text, cannot
            be parsed, or has a key twice in one mapping.
    """
    try:
        text = _read(path)
        if path.suffix == ".json":
            return text, json.loads(text, object_pairs_hook=_object)
        return text, yaml.load(text, _Loader)
    except OSError as error:
        hint = ", expected a YAML or JSON file" if isinstance(error, IsADirectoryError) else ""
        raise StoreError(f"{path}: cannot be read: {error.strerror}{hint}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise InvalidModelError(f"{path}: cannot be parsed: {reason}") from error


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(TEXT_BYTES_MAX + 1)
    if len(data) > TEXT_BYTES_MAX:
        raise ValueError(f"over {TEXT_BYTES_MAX} bytes: is it a checkpoint?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 text at byte {error.start}: is it a checkpoint?") from error


class _Loader(yaml.SafeLoader):
    """Loader that rejects a repeated key. SafeLoader takes its last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        _check_unique(
            (self._key(key), f"line {key.start_mark.line + 1}: ")
            for key, _ in node.value
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE
        )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Returns the value of ``node``. Raises ValueError for text that is none of its tag, where
        SafeLoader raises AttributeError, IndexError or KeyError, too."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, ValueError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            line, tag = node.start_mark.line + 1, node.tag.rpartition(":")[2]
            raise ValueError(f"line {line}: {node.value!r} is no {tag}") from error

    def _key(self, node: yaml.ScalarNode) -> Any:
        """Returns the key that the mapping will have."""
        return node.value if node.tag == _VALUE else self.construct_object(node, deep=True)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_unique((key, "") for key, _ in pairs)
    return dict(pairs)


def _check_unique(keys: Iterable[tuple[Any, str]]) -> None:
    """Raises ValueError if one of ``keys`` is there twice, or the text of one is another. The
    message begins with the line that comes with it."""
    seen: set[Any] = set()
    for key, line in keys:
        if key in seen or str(key) in seen:
            raise ValueError(f"{line}key {key!r} is there twice")
        seen |= {key, str(key)}
