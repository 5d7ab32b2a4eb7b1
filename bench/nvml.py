"""GPUs as NVIDIA's driver reports them through NVML. FBGEMM uses NVML to find links between
GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

LIBRARY = "libnvidia-ml.so.1"
LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCI Express lane in each direction, by generation, without packet headers."""


def driver_rows() -> Iterator[tuple[str, str]]:
    """Yields (property, value) pairs; a single pair with the reason if there is no driver."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError as error:
        yield "NVML", f"left out: {error}"
        return
    if status := nvml.nvmlInit_v2():
        yield "NVML", f"left out: it does not start, error {status}"
        return
    version = ctypes.create_string_buffer(80)
    nvml.nvmlSystemGetDriverVersion(version, len(version))
    yield "driver", version.value.decode()
    for gpu in range(_number(nvml.nvmlDeviceGetCount_v2)):
        device = ctypes.c_void_p()
        nvml.nvmlDeviceGetHandleByIndex_v2(gpu, ctypes.byref(device))
        generation = _number(nvml.nvmlDeviceGetMaxPcieLinkGeneration, device)
        lanes = _number(nvml.nvmlDeviceGetMaxPcieLinkWidth, device)
        rate = LANE_GB_PER_S.get(generation, 0.0) * lanes
        yield f"PCIe of GPU {gpu}", f"{generation}.0 x{lanes}, {rate:.1f} GB/s each way at most"


def _number(function: ctypes._NamedFuncPointer, *arguments: ctypes.c_void_p) -> int:
    """Returns the number that ``function`` writes to its last argument."""
    number = ctypes.c_uint()
    function(*arguments, ctypes.byref(number))
    return number.value
