"""An alias: a name for a version of a model, such as stable, that can be moved to another one.

STORE/MODEL/aliases/NAME/NUMBER.json, one small sealed file for each change; the highest number
holds. Files are added and never changed, so that a reader finds the change before or the one after,
and who moved an alias, when and why stays known.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from embedserve_store.errors import StoreError
from embedserve_store.format.json_fields import parse_json, typed
from embedserve_store.format.manifest_checksum import check_seal, sealed_json
from embedserve_store.format.version_folder import VERSION_PATTERN

FORMAT_VERSION = 2
"""1 has no seal (seal.py)."""
FOLDER = "aliases"
NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
RESERVED = ("latest", "none")
"""Names that mean something by themselves."""
_FILE_PATTERN = re.compile(rf"({VERSION_PATTERN.pattern})\.json")


@dataclass(frozen=True)
class Alias:
    """One change of an alias."""

    model: str
    name: str
    number: int
    """Of the change: 1 for the first."""
    version: int | None
    """None: the alias was removed."""
    who: str
    when: str
    """ISO 8601, UTC."""
    why: str
    share: float = 0.0
    """Of the requests that name the model and no version, in percent: what servers of it are to
    answer with this version, where another answers the rest."""
    shadow: float = 0.0
    """Of the batches of the version that answers the rest, in percent: what this one is to look up,
    too, to be compared."""

    def to_bytes(self) -> bytes:
        return sealed_json(
            {
                "format_version": FORMAT_VERSION,
                "model": self.model,
                "alias": self.name,
                "number": self.number,
                "version": self.version,
                "who": self.who,
                "when": self.when,
                "why": self.why,
                "share": self.share,
                "shadow": self.shadow,
            }
        )


def check_name(name: str) -> None:
    """Raises StoreError unless an alias may be called so."""
    if not NAME_PATTERN.fullmatch(name) or name in RESERVED:
        raise StoreError(
            f"alias name {name!r}: use up to 64 letters, digits, '_', '-' and '.', begin with a "
            f"letter or '_', and not {' or '.join(RESERVED)}"
        )


def file_name(name: str, number: int) -> str:
    """In the folder of the model."""
    return f"{FOLDER}/{name}/{number}.json"


def parse_file_name(path: str) -> tuple[str, int] | None:
    """(name, number) of a path below FOLDER; None for whatever else lies there.

    >>> parse_file_name("stable/12.json"), parse_file_name("stable/.new-3")
    (('stable', 12), None)
    """
    name, _, file = path.partition("/")
    match = _FILE_PATTERN.fullmatch(file)
    return (name, int(match[1])) if match and NAME_PATTERN.fullmatch(name) else None


def parse_alias(text: bytes, model: str, name: str, number: int, where: str) -> Alias:
    """The change ``number`` of an alias. ``where`` names the file in errors.

    Raises:
        StoreError: it is damaged, or another's.
    """
    data = parse_json(text, where)
    if not isinstance(data, dict) or data.get("format_version") != FORMAT_VERSION:
        found = data.get("format_version") if isinstance(data, dict) else json.dumps(data)[:40]
        raise StoreError(
            f"{where}: format_version is {found!r}, this embedserve reads {FORMAT_VERSION}"
        )
    check_seal(text, where)
    version = data.get("version")
    alias = Alias(
        model=typed(data, "model", str, where),
        name=typed(data, "alias", str, where),
        number=typed(data, "number", int, where),
        version=None if version is None else typed(data, "version", int, where),
        who=typed(data, "who", str, where),
        when=typed(data, "when", str, where),
        why=typed(data, "why", str, where),
        share=typed({"share": 0.0} | data, "share", float, where),
        shadow=typed({"shadow": 0.0} | data, "shadow", float, where),
    )
    if (alias.model, alias.name, alias.number) != (model, name, number):
        raise StoreError(
            f"{where}: is change {alias.number} of alias {alias.name!r} of model {alias.model!r}, "
            f"but lies where change {number} of {name!r} of {model!r} does"
        )
    return alias
