"""Copies the deltas that continue copied versions, in the order of their lines.

The files of a delta come before its manifest, and a manifest is created only where there is none.
So a copy that was killed leaves deltas that continue one another, and the next copy continues
there. Never replaces a file. Never imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.errors import StoreError
from embedserve_store.format.delta_file import check_bytes
from embedserve_store.format.delta_manifest import (
    DELTAS_FOLDER,
    MANIFEST_BYTES_MAX,
    DeltaFile,
    DeltaManifest,
    LinePosition,
    manifest_name,
    position_of,
)
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.manifest_checksum import check_sha256
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.added_file import Write, writer
from embedserve_store.publishing.record_event import record_event


def copy_deltas(
    source: ModelStore, target: ModelStore, manifests: Iterable[Manifest], *, who: str | None = None
) -> int:
    """Copies the deltas after each of the versions, and returns how many the target did not have.

    Of several versions of a line, the one with the smallest seq counts. Deltas that the source
    receives meanwhile are left for the next copy.

    Args:
        manifests: manifests of versions of one model, at least one. The target has these versions.
        who: author recorded in the history of the target. Default: USER@HOST.

    Raises:
        StoreError: a delta is missing or damaged, does not continue the delta before it, or is
            another than the target's delta of its seq. The deltas before it are copied. Also
            raised if a store cannot be read or written.
    """
    bases: dict[int, Manifest] = {}
    for base in sorted(manifests, key=lambda one: position_of(one).seq):
        bases.setdefault(position_of(base).line, base)
    model = next(iter(bases.values())).model
    lines = {path.partition("/")[0] for path in source.files_beside(model, DELTAS_FOLDER)}
    stored = {number: base for number, base in bases.items() if str(number) in lines}
    if not stored:
        return 0
    there = frozenset(target.files_beside(model, DELTAS_FOLDER))
    # A damaged delta prevents the copy of older lines only.
    newest_first = sorted(stored, reverse=True)
    return sum(_LineCopy(source, target, stored[one], there).run(who) for one in newest_first)


class _LineCopy:
    """Copy of the deltas after one version.

    Args:
        there: paths LINE/FILE that the target has.
    """

    def __init__(
        self, source: ModelStore, target: ModelStore, base: Manifest, there: Collection[str]
    ) -> None:
        self._source = source
        self._target = target
        self._base = base
        self._there = there
        self._line = DeltaLine(source, base)
        self._folder = f"{base.model}/{DELTAS_FOLDER}"
        self._write: Write = writer(target.where, self._folder)

    def run(self, who: str | None) -> int:
        """Copies the deltas, records the copy in the history, and returns their number."""
        copied = 0
        last = self._line.start
        try:
            for delta, position in self._line.deltas():
                if self._copy(delta, position):
                    copied, last = copied + 1, position
        finally:
            if copied:
                record_event(
                    self._target.where,
                    "copy",
                    self._base.model,
                    (self._base.version,),
                    who=who,
                    source=f"{self._source.where}/{self._base.model}",
                    detail=f"line {last.line}, deltas up to {last.seq}, {copied} copied",
                )
        return copied

    def _copy(self, delta: DeltaManifest, position: LinePosition) -> bool:
        """Copies what the target lacks of a delta. Returns False if it has the whole delta."""
        path = f"{delta.line}/{manifest_name(delta.seq)}"
        is_there = path in self._there
        if is_there:
            self._check_same(path, position)
        missing = [one for one in delta.files if not self._has(one, delta.line, is_there)]
        for file in missing:
            self._write(f"{self._folder}/{delta.line}/{file.name}", self._line.file_bytes(file))
        if is_there:
            return bool(missing)
        data = self._source.read(f"{self._folder}/{path}", MANIFEST_BYTES_MAX)
        check_sha256(
            hashlib.sha256(data).hexdigest(),
            position.checksum,
            f"{self._source.where}/{self._folder}/{path}",
        )
        if self._write(f"{self._folder}/{path}", data):
            return True
        self._check_same(path, position)
        return bool(missing)

    def _has(self, file: DeltaFile, line: int, is_complete: bool) -> bool:
        """Returns whether the target has a file, which is read unless the delta is complete.

        Raises:
            StoreError: the target's file is damaged. No manifest has made it visible.
        """
        path = f"{line}/{file.name}"
        if path not in self._there:
            return False
        if not is_complete:
            path = f"{self._folder}/{path}"
            data = self._target.read(path, file.nbytes)
            check_bytes(data, file, f"{self._target.where}/{path}")
        return True

    def _check_same(self, path: str, position: LinePosition) -> None:
        """Raises StoreError if the target has another delta at ``position``."""
        found = self._target.read(f"{self._folder}/{path}", MANIFEST_BYTES_MAX)
        if hashlib.sha256(found).hexdigest() != position.checksum:
            raise StoreError(
                f"{self._target.where}/{self._folder}/{path}: is another delta {position.seq} of "
                f"line {position.line} than that of {self._source.where}: jobs pushed to both "
                "stores, or the file is damaged"
            )
