"""Names of a model and a version, as requests use them: NAME, NAME@VERSION or NAME@ALIAS."""

from __future__ import annotations

from typing import NamedTuple

from embedserve.errors import InvalidRequestError

VERSION_CHARACTERS_MAX = 64
"""Maximum characters of a version number or an alias; the request is rejected above that."""


class VersionKey(NamedTuple):
    """A version of a model, by its number alone: shards know no aliases."""

    model: str
    version: int

    def __str__(self) -> str:
        return f"{self.model}@{self.version}"


def split_name(name: str) -> tuple[str, str]:
    """Returns (model, version) of a name that --model or a request has; version is "" if it names
    none.

    >>> split_name("movies@stable"), split_name("movies")
    (('movies', 'stable'), ('movies', ''))
    """
    model, _, version = name.partition("@")
    return model, version


def qualified_model_name(model: str, version: int | str) -> str:
    """Returns the qualified name of ``version`` of ``model``, where "" is the default model.

    Raises:
        InvalidRequestError: ``model`` already names a version, or ``version`` cannot be one.
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
