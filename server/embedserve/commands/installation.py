"""Installed versions of PyTorch, FBGEMM and TorchRec, and how to install them.

It imports none of them, because the process that forks workers must not.
"""

from __future__ import annotations

import importlib.util
import platform
import re
from importlib.metadata import PackageNotFoundError, version

ENGINE = ("torch", "fbgemm_gpu", "torchrec")
"""Modules that the extras cpu and cuda install."""
FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")
"""Distributions of the module fbgemm_gpu. Only one can be installed: their files have the same
names."""
INSTALL = (
    "on a CPU pip install 'embedserve[cpu]' and then pip install --no-deps torchrec==1.8.0, "
    "for CUDA pip install 'embedserve[cuda]'"
)
TORCH_MINOR_AHEAD = 5
"""FBGEMM 1.N is built for PyTorch 2.(N+5): the table in fbgemm_gpu/__init__.py."""


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and of the engine's installed distributions, by name."""
    found = {"Python": platform.python_version()}
    for name in ("torch", "torchrec", *FBGEMM):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_engine() -> None:
    """Raises ModuleNotFoundError if a package of the engine is missing, and ValueError if FBGEMM
    and PyTorch are of two releases."""
    for name in ENGINE:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    check_releases(installed_versions())


def check_releases(versions: dict[str, str]) -> None:
    """Raises ValueError if FBGEMM and PyTorch of ``versions`` do not load together."""
    builds = [name for name in FBGEMM if name in versions]
    if len(builds) > 1:
        raise ValueError(
            f"{' and '.join(builds)} are both installed, and each has overwritten files of the "
            f"other: pip uninstall both, then {INSTALL}"
        )
    for name in builds:
        fbgemm, torch = _release(versions[name]), _release(versions.get("torch", ""))
        if fbgemm is None or torch is None or (fbgemm[0], torch[0]) != (1, 2):
            continue  # of another numbering, such as a nightly build's
        needed = fbgemm[1] + TORCH_MINOR_AHEAD
        if torch[1] != needed:
            raise ValueError(
                f"{name} {versions[name]} is built for torch 2.{needed}, but torch "
                f"{versions['torch']} is installed: {INSTALL}"
            )


def _release(text: str) -> tuple[int, int] | None:
    """Returns major and minor number of a version; None if it has no release's form."""
    found = re.match(r"(\d+)\.(\d+)\.\d+(\+|\.post|$)", text)
    return None if found is None else (int(found[1]), int(found[2]))
