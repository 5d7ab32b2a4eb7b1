"""Attaches memory of a GPU to addresses, page by page, through CUDA's driver.

torch allocates all of a tensor's memory at once. Here a tensor may be larger than its memory, like
a mapping of this host's memory: addresses are reserved first, and pages follow where they are used.
"""

from __future__ import annotations

from typing import Any

import torch

from embedserve_store.errors import StoreError


class GpuPages:
    """Pages of the memory of one GPU. They are the process's until it ends.

    Attributes:
        page_bytes: size of a page, 2 MiB on most GPUs.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver  # a requirement of torch's builds for CUDA

        torch.empty(0, device=device)  # starts CUDA on the device
        self._driver: Any = driver
        self._device = device
        self._location = driver.CUmemLocation()
        self._location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = device.index
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = self._location
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_bytes = int(
            self._call(driver.cuMemGetAllocationGranularity, self._kind, smallest)
        )
        self._pages: list[Any] = []

    def allocate(self, nbytes: int) -> None:
        """Allocates pages for later calls of ``attach``.

        Raises:
            StoreError: the GPU does not have that much memory.
        """
        pages = -(-nbytes // self.page_bytes)
        self._pages += [self._allocate(self.page_bytes) for _ in range(pages)]

    def reserve(self, nbytes: int) -> int:
        """Returns the first of ``nbytes`` addresses without memory; ``nbytes`` is a multiple of a
        page."""
        return int(self._call(self._driver.cuMemAddressReserve, nbytes, 0, 0, 0))

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns uint8 [nbytes] over addresses. The first page must have memory.

        An access to a part without memory fails, and with it all later calls of CUDA.
        """
        return torch.as_tensor(_Addresses(address, nbytes), device=self._device)

    def attach_new(self, address: int, nbytes: int) -> None:
        """Attaches newly allocated memory to a range of whole pages.

        Raises:
            StoreError: the GPU does not have that much memory.
        """
        self._attach(address, nbytes, self._allocate(nbytes))

    def attach(self, address: int, nbytes: int) -> None:
        """Attaches pages that were allocated before to a range of whole pages."""
        for start in range(address, address + nbytes, self.page_bytes):
            self._attach(start, self.page_bytes, self._pages.pop())

    def _allocate(self, nbytes: int) -> Any:
        return self._call(self._driver.cuMemCreate, nbytes, self._kind, 0)

    def _attach(self, address: int, nbytes: int, memory: Any) -> None:
        driver = self._driver
        self._call(driver.cuMemMap, address, nbytes, 0, memory, 0)
        access = driver.CUmemAccessDesc()
        access.location = self._location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call(driver.cuMemSetAccess, address, nbytes, [access], 1)

    def _call(self, function: Any, *arguments: Any) -> Any:
        error, *results = function(*arguments)
        if error:
            raise StoreError(f"{self._device}: {function.__name__} fails with {error.name}")
        return results[0] if results else None


class _Addresses:
    """Range of a GPU's addresses, which torch takes as a tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
