"""A cache of the functions that TorchScript reads, for processes that compile many lookups."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


def cache_definitions() -> None:
    """Makes TorchScript read and parse each function once in this process, for all models.

    TorchScript reads the same few hundred functions of torchrec for each engine, which takes a
    third of the time of restoring one. Methods are cached by their functions, which reference no
    module.
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
    """Returns the function of a method, and any other object unchanged."""
    return getattr(one, "__func__", one)
