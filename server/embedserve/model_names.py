"""Names that requests use for a model and a version: NAME, NAME@VERSION or NAME@ALIAS."""

from __future__ import annotations

from embedserve.errors import InvalidRequestError

VERSION_CHARACTERS_MAX = 64
"""Of a number or an alias."""


def split_name(name: str) -> tuple[str, str]:
    """(model, version) of a name as --model and requests have it; "" where it has no version.

    >>> split_name("movies@stable"), split_name("movies")
    (('movies', 'stable'), ('movies', ''))
    """
    model, _, version = name.partition("@")
    return model, version


def qualified_model_name(model: str, version: int | str) -> str:
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
