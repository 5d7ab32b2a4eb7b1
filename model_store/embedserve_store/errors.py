"""Errors of the model store: mistakes of the person who publishes or serves a model.

Each message is one line for that person. It names the file or table, and the reason. In the whole
package a parameter ``where`` is what a message begins with: the name of a file, table or version.
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

NO_ACCESS = "no access to the store"
"""Begins the message of an error after which nothing is known to be wrong in the store."""
LIBRARY_FAULT = "Could not load this library"
"""Begins the message of the OSError that torch raises for a library."""
NO_MEMORY = "no memory is left"
NO_THREAD = "can't start new thread"
"""Message of Python's RuntimeError at a limit of threads."""


class StoreError(Exception):
    """A store, model or version cannot be used, or a publish cannot be done.

    The message names the file or folder that is wrong, and the reason.
    """


class UnknownAliasError(StoreError):
    """No alias has the requested name."""


class MissingFileError(StoreError):
    """A file does not exist in the store."""


class InvalidModelError(StoreError):
    """A model, description or plan cannot be published. Names the table and the reason."""


class UnreachableError(StoreError):
    """The store does not respond or denies access, so its contents are unknown: nothing is known
    to be damaged, and a later attempt may succeed."""


class UnopenedError(StoreError):
    """A version cannot be opened now. It may become available: when its files are fully copied or
    repaired, when the shards of a router answer, or when memory is free."""


class NoSuchPartError(StoreError):
    """A version has no parts, or another number of parts than requested. It never will have."""


class GoldensError(StoreError):
    """The rows after a delta do not give the results of its goldens."""


class NoRoomError(StoreError):
    """A file system has less free space than a version needs."""


class WriterFencedError(StoreError):
    """Another writer has appended to the line. This writer has stopped and appends nothing more."""


class RevertedError(StoreError):
    """Somebody has undone deltas of this writer, which appends nothing until ``resume``.

    Attributes:
        reverts_to: seq of the delta whose rows are served again.
    """

    def __init__(self, message: str, reverts_to: int) -> None:
        super().__init__(message, reverts_to)
        self.reverts_to = reverts_to

    def __str__(self) -> str:
        return str(self.args[0])


TRANSIENT = (UnopenedError, UnreachableError, BlockingIOError)
"""Errors after which the same version may be served later; BlockingIOError is one of a system that
has no process or thread left."""


def is_process_limit(error: Exception) -> bool:
    """Returns whether ``error`` says that no process or thread can be started. Output that would
    block raises a BlockingIOError, too, which counts the characters that were written."""
    is_fork = isinstance(error, BlockingIOError) and not hasattr(error, "characters_written")
    return is_fork or str(error) == NO_THREAD


def described(error: Exception) -> str:
    """Returns the message of ``error``, which for a store that cannot be reached says so first. For
    a library that torch cannot load it is the loader's reason; torch's own names the library alone.
    """
    if is_process_limit(error):
        return "no process or thread can be started: a limit of the user or container is reached"
    if str(error).startswith(LIBRARY_FAULT) and error.__cause__:
        return str(error.__cause__)
    if isinstance(error, MemoryError):
        return str(error) or NO_MEMORY
    return f"{NO_ACCESS}: {error}" if isinstance(error, UnreachableError) else str(error)


def failed_write(what: str, error: OSError) -> StoreError:
    """Returns the error for ``what`` failed, with the reason and the file if it is known. It is a
    NoRoomError if the disk is full, as when two writers at once had room for one."""
    written = error.filename2 or error.filename  # of a copy, filename is the file that was read
    file = f" ({written})" if written else ""
    kind = NoRoomError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
    return kind(f"{what}: {error.strerror or error}{file}")


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Converts an OSError within the block to a StoreError, whose message begins with ``where``."""
    try:
        yield
    except OSError as error:
        # A message of safetensors ends with the path.
        reason = error.strerror or str(error).removesuffix(f": {where}")
        raise StoreError(f"{where}: cannot be read: {reason}") from error


@contextmanager
def needing_memory(what: str) -> Iterator[None]:
    """Converts a lack of memory within the block to a StoreError, whose message begins with
    ``what``."""
    try:
        yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise StoreError(f"{what}: {NO_MEMORY}") from error


@contextmanager
def checking_model() -> Iterator[None]:
    """Converts a StoreError within the block to an InvalidModelError of the same message."""
    try:
        yield
    except StoreError as error:
        raise InvalidModelError(str(error)) from error


def unreadable(
    path: object, problem: str, error: OSError, missing: type[StoreError] = MissingFileError
) -> StoreError:
    """Returns the error for a path whose use failed.

    Args:
        missing: kind of the error if the path does not exist.
    """
    message = f"{path}: {problem}: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        return missing(message)
    is_there = isinstance(error, IsADirectoryError | NotADirectoryError)
    return StoreError(message) if is_there else UnreachableError(message)


def check_tables_known(what: str, named: Iterable[str], tables: Iterable[str]) -> None:
    """Raises InvalidModelError if ``what`` names a table that is not one of the model's
    ``tables``."""
    there = [*tables]
    for name in named:
        if name not in there:
            listed = ", ".join(there)
            raise InvalidModelError(f"{what} names table {name!r}, the model has {listed}")


def missing_model(where: object, model: str, models: Iterable[str]) -> StoreError:
    """Returns the error for a model that is not in the store at ``where``."""
    there = ", ".join(models) or "none"
    return StoreError(f"{where}: there is no model {model!r}; models are {there}")


def missing_version(where: object, version: int, versions: Iterable[int]) -> StoreError:
    """Returns the error for a version that the model at ``where`` does not have."""
    there = ", ".join(map(str, versions)) or "none"
    return StoreError(f"{where}: version {version} does not exist; versions are {there}")
