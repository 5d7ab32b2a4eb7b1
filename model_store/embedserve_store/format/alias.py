"""Defines aliases: names such as "stable" for a version of a model, which can be moved.

Each change is a small sealed file, STORE/MODEL/aliases/NAME/NUMBER.json. The change with the
highest number applies. Files are added and never changed, so a reader finds the state before or
after a change. The files also record the author, time and reason of each change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import DELTA_SEQ_MAX
from embedserve_store.format.json_fields import typed
from embedserve_store.format.manifest_checksum import parse_sealed, sealed_json
from embedserve_store.format.version_folder import VERSION_PATTERN

FORMAT_VERSION = 2
"""Format version of alias files, which have a seal (manifest_checksum.py); version 1 had none."""
ALIASES_FOLDER = "aliases"
NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
RESERVED = ("latest", "none")
"""Names that cannot be aliases, because they have another meaning in place of a version."""
_FILE_PATTERN = re.compile(rf"({VERSION_PATTERN.pattern})\.json")


@dataclass(frozen=True)
class Alias:
    """A change of an alias."""

    model: str
    name: str
    change_number: int
    """Number of the change, from 1."""
    version: int | None
    """Version that the alias points to; None if the change removes the alias."""
    who: str
    when: str
    """Time of the change: ISO 8601, UTC."""
    why: str
    share: float = 0.0
    """Percentage of the requests that name the model without a version. Servers route these
    requests to this version; another version serves the rest."""
    shadow: float = 0.0
    """Percentage of that other version's batches that this version also looks up, so that servers
    compare the results."""
    at_seq: int | None = None
    """Last delta of the version's line whose rows servers use. None: every delta that comes."""

    def to_bytes(self) -> bytes:
        fields = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "alias": self.name,
            "number": self.change_number,
            "version": self.version,
            "who": self.who,
            "when": self.when,
            "why": self.why,
            "share": self.share,
            "shadow": self.shadow,
        }
        return sealed_json(fields if self.at_seq is None else fields | {"at_seq": self.at_seq})


def check_name(name: str) -> None:
    """Raises StoreError unless ``name`` is valid for an alias."""
    if not NAME_PATTERN.fullmatch(name) or name in RESERVED:
        raise StoreError(
            f"alias name {name!r}: use up to 64 letters, digits, '_', '-' and '.', begin with a "
            f"letter or '_', and not {' or '.join(RESERVED)}"
        )


def alias_path(name: str, number: int) -> str:
    """Returns the path of a change, relative to the folder of the model."""
    return f"{ALIASES_FOLDER}/{name}/{number}.json"


def parse_alias_path(path: str) -> tuple[str, int] | None:
    """Returns (name, number) of a path below ALIASES_FOLDER; None if the path is not that of a
    change.

    >>> parse_alias_path("stable/12.json"), parse_alias_path("stable/.new-3")
    (('stable', 12), None)
    """
    name, _, file = path.partition("/")
    match = _FILE_PATTERN.fullmatch(file)
    return (name, int(match[1])) if match and NAME_PATTERN.fullmatch(name) else None


def parse_alias(text: bytes, model: str, name: str, number: int, where: str) -> Alias:
    """Parses change ``number`` of an alias from ``text``.

    Raises:
        StoreError: the file is damaged, or belongs to another model, alias or number.
    """
    data = parse_sealed(text, where, FORMAT_VERSION)
    version, at_seq = data.get("version"), data.get("at_seq")
    alias = Alias(
        model=typed(data, "model", str, where),
        name=typed(data, "alias", str, where),
        change_number=typed(data, "number", int, where),
        version=None if version is None else typed(data, "version", int, where),
        who=typed(data, "who", str, where),
        when=typed(data, "when", str, where),
        why=typed(data, "why", str, where),
        share=typed({"share": 0.0} | data, "share", float, where),
        shadow=typed({"shadow": 0.0} | data, "shadow", float, where),
        at_seq=None if at_seq is None else typed(data, "at_seq", int, where),
    )
    if alias.at_seq is not None and not 0 <= alias.at_seq <= DELTA_SEQ_MAX:
        raise StoreError(f"{where}: at_seq is {alias.at_seq}, expected 0 to {DELTA_SEQ_MAX}")
    if (alias.model, alias.name, alias.change_number) != (model, name, number):
        raise StoreError(
            f"{where}: is change {alias.change_number} of alias {alias.name!r} of model "
            f"{alias.model!r}, but lies where change {number} of {name!r} of {model!r} does"
        )
    return alias
