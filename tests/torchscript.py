"""Caches what TorchScript reads of functions, where a process compiles many lookups."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


def cache_definitions() -> None:
    """Has each function read and parsed once in this process, for all models.

    TorchScript reads the same few hundred functions of torchrec for each engine: a third of the
    time that restoring one takes. Methods are cached as their functions, which keep no module.
    """
    from torch.jit import _recursive, _script, frontend

    module: Any = inspect
    lines_of: Any = cache(inspect.getsourcelines)
    module.getsourcelines = lambda one: lines_of(_function_of(one))
    parsed: Any = cache(frontend.get_jit_def)

    def get_jit_def(one: Any, *names: Any, **options: Any) -> object:
        return parsed(_function_of(one), *names, **options)

    for module in (frontend, _recursive, _script):
        module.get_jit_def = get_jit_def


def _function_of(one: Any) -> Any:
    """Returns the function of a method, and anything else as it is."""
    return getattr(one, "__func__", one)
