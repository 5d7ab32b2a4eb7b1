"""Caches of what TorchScript reads and compiles, for processes that compile many lookups."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any


def cache_definitions() -> None:
    """Makes TorchScript read and parse each function and class once per process, for all models.

    TorchScript reads the same few hundred functions of torchrec for each engine, which takes a
    third of the time of restoring one; it parses each function a second time for its annotations.
    Methods are cached by their functions, which reference no module.
    """
    from torch import _jit_internal
    from torch.jit import _recursive, _script, frontend

    module: Any = inspect
    lines_of: Any = cache(inspect.getsourcelines)
    module.getsourcelines = lambda one: lines_of(_function_of(one))
    parsed: Any = cache(frontend.get_jit_def)

    def get_jit_def(one: Any, *names: Any, **options: Any) -> object:
        return parsed(_function_of(one), *names, **options)

    class_of: Any = cache(frontend.get_jit_class_def)
    for module in (frontend, _recursive, _script):
        module.get_jit_def = get_jit_def
        if hasattr(module, "get_jit_class_def"):
            module.get_jit_class_def = class_of

    module = _jit_internal
    hints_of: Any = cache(module.get_type_hint_captures)
    module.get_type_hint_captures = lambda one: hints_of(_function_of(one))


def _function_of(one: Any) -> Any:
    """Returns the function of a method, and any other object unchanged."""
    return getattr(one, "__func__", one)


@contextmanager
def shared_compilation_unit() -> Iterator[None]:
    """Makes all engines that are restored within its block share a compilation unit.

    Each engine else compiles torchrec's functions and classes into a unit of its own, which takes a
    fifth of the time of restoring it. The shared unit is freed at the end of the block.
    """
    import pytest

    from embedserve.engine import restore
    from embedserve.engine.compile import own_compilation_unit

    with own_compilation_unit(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(restore, "own_compilation_unit", nullcontext)
        yield
