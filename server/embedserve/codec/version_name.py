"""The version that a request names beside its model."""

from __future__ import annotations

from embedserve.errors import InvalidRequestError

VERSION_CHARACTERS_MAX = 64
"""Of a number or an alias."""


def with_version(model: str, version: int | str) -> str:
    """The name of ``version`` of ``model``, "" for the default one, as requests have it.

    Raises:
        InvalidRequestError: ``model`` has one already, or it can be none.
    """
    shown = str(version)
    if not shown or len(shown) > VERSION_CHARACTERS_MAX or "@" in shown:
        raise InvalidRequestError(
            f"version is {shown[:VERSION_CHARACTERS_MAX]!r}: expected a number or an alias",
            "version",
        )
    if "@" in model:
        raise InvalidRequestError(
            f"version is {shown!r}, but the model {model!r} says which already", "version"
        )
    return f"{model}@{shown}"
