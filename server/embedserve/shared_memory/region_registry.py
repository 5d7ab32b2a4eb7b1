"""Registry of the shared-memory regions that callers have registered, by owner.

Only its owner may use, list and unregister a region. The owner may do so over any connection and
protocol, because clients register over one connection and send requests over others. The registry
is used on the event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from types import MappingProxyType

from embedserve.config import Limits
from embedserve.errors import (
    ConflictError,
    InvalidRequestError,
    RequestTooLargeError,
    UnknownRegionError,
)
from embedserve.shared_memory.region import FOLDER, Region, Regions, open_region

EVERYBODY = ""
"""Owner of the regions of all callers without authentication."""
OWNER_SHARE = 1 / 2
"""Fraction of the limits, rounded up, that one authenticated owner may use; EVERYBODY may use
all."""
NAME_CHARACTERS_MAX = 256
"""Characters of a region's name; also of names and keys shown in error messages."""
NONE: Regions = MappingProxyType({})


class RegionRegistry:
    """Registered regions of a process."""

    def __init__(self, prefix: str, limits: Limits, folder: str = FOLDER) -> None:
        """
        Args:
            prefix: slash and required prefix of the file names that may be registered.
            limits: limits on the number of regions and on their bytes.
            folder: folder of the files.
        """
        self._prefix = prefix
        self._limits = limits
        self._folder = folder
        self._regions: dict[str, dict[str, Region]] = {}

    def of(self, owner: str) -> Regions:
        """Returns the regions that requests of ``owner`` may use, by name."""
        return self._regions.get(owner, NONE)

    def register(self, owner: str, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers a range of the file that ``key`` names as region ``name``.

        Raises:
            InvalidRequestError: the name, key, range or file is invalid.
            ConflictError: the owner has a region of that name, a limit on the number or total size
                of regions is reached, or another owner has registered the file.
            RequestTooLargeError: the region alone exceeds a limit on total size.
        """
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            raise InvalidRequestError(
                f"name has {len(name)} characters, expected 1 to {NAME_CHARACTERS_MAX}", "name"
            )
        if offset < 0 or byte_size < 1:
            raise InvalidRequestError(
                f"offset is {offset} and byte_size {byte_size}, expected 0 or more and 1 or more",
                "byte_size" if byte_size < 1 else "offset",
            )
        self._drop_unlinked()
        if name in self.of(owner):
            raise ConflictError(
                f"shared memory region {name!r} is registered already: unregister it first", "name"
            )
        self._check_room(owner, byte_size)
        region = open_region(name, key, offset, byte_size, self._prefix, self._folder)
        if self._is_anothers(region.file, owner):
            region.close()
            shown = key[:NAME_CHARACTERS_MAX]
            raise ConflictError(f"key is {shown!r}: another caller has registered its file", "key")
        self._regions.setdefault(owner, {})[name] = region

    def status(self, owner: str, name: str = "") -> list[Region]:
        """Returns the region ``name`` of ``owner``, or all its regions if ``name`` is "".

        Raises:
            UnknownRegionError: the owner has no region of that name.
        """
        self._drop_unlinked()
        own = self.of(owner)
        if not name:
            return list(own.values())
        if name not in own:
            raise UnknownRegionError(
                f"shared memory region {name[:NAME_CHARACTERS_MAX]!r} is not registered", "name"
            )
        return [own[name]]

    def unregister(self, owner: str, name: str = "") -> None:
        """Unregisters the region ``name`` of ``owner``, or all its regions if ``name`` is "". An
        unknown name is ignored."""
        for one in [name] if name else list(self.of(owner)):
            if one in self.of(owner):
                self._drop(owner, one)

    def drop_stale(self, may_embed: Callable[[str], bool] | None) -> None:
        """Unregisters regions whose file was removed and regions of owners that may no longer
        embed; called about every second."""
        for owner in list(self._regions):
            if may_embed is not None and not may_embed(owner):
                self.unregister(owner)
        self._drop_unlinked()

    def close(self) -> None:
        """Unregisters all regions."""
        for owner in list(self._regions):
            self.unregister(owner)

    def _drop_unlinked(self) -> None:
        for owner, regions in list(self._regions.items()):
            for name in [name for name, one in regions.items() if one.is_unlinked]:
                self._drop(owner, name)

    def _drop(self, owner: str, name: str) -> None:
        regions = self._regions[owner]
        regions.pop(name).close()
        if not regions:
            del self._regions[owner]

    def _check_room(self, owner: str, byte_size: int) -> None:
        every = [one for regions in self._regions.values() for one in regions.values()]
        shares = [("all callers'", every, 1.0)]
        if owner != EVERYBODY:
            shares.insert(0, ("this caller's", list(self.of(owner).values()), OWNER_SHARE))
        limits = self._limits
        for whose, held, share in shares:
            count_max = ceil(share * limits.shared_memory_regions_max)
            if len(held) >= count_max:
                raise ConflictError(
                    f"{len(held)} regions of shared memory are registered, {whose} limit is "
                    f"{count_max} (--shared-memory-regions-max): unregister others first",
                    "name",
                )
            bytes_max = ceil(share * limits.shared_memory_bytes_max)
            if byte_size > bytes_max:
                raise RequestTooLargeError(
                    f"byte_size is {byte_size}, {whose} limit is {bytes_max} "
                    "(--shared-memory-bytes-max)",
                    "byte_size",
                )
            nbytes = sum(one.byte_size for one in held)
            if nbytes + byte_size > bytes_max:
                raise ConflictError(
                    f"byte_size is {byte_size}, and {nbytes} bytes are registered: {whose} limit "
                    f"is {bytes_max} (--shared-memory-bytes-max)",
                    "byte_size",
                )

    def _is_anothers(self, file: tuple[int, int], owner: str) -> bool:
        return any(
            one.file == file
            for other, regions in self._regions.items()
            if other != owner
            for one in regions.values()
        )
