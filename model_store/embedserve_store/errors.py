"""The errors of the model store: what a person publishing or serving a model did wrong.

Each message is one line for that person and names the file or table, and why.
"""

from collections.abc import Iterable


class StoreError(Exception):
    """A store, model or version that cannot be used, or a publish that cannot be done.

    The message names the file or folder that is wrong, and says why.
    """


class UnknownAliasError(StoreError):
    """There is no alias of that name."""


class InvalidModelError(StoreError):
    """A model, description or plan that cannot be published; names the table and the reason."""


class NoRoomError(StoreError):
    """A file system has less room than a version needs."""


def missing_model(where: object, model: str, models: Iterable[str]) -> StoreError:
    """Returns the error for a model that the store in ``where`` does not have."""
    there = ", ".join(models) or "none"
    return StoreError(f"{where}: there is no model {model!r}; models are {there}")


def missing_version(where: object, version: int, versions: Iterable[int]) -> StoreError:
    """Returns the error for a version that the model in ``where`` does not have."""
    there = ", ".join(map(str, versions)) or "none"
    return StoreError(f"{where}: version {version} does not exist; versions are {there}")
