"""What is kept of requests that were met, so that those of the same form are not parsed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
FORMS_MAX = 16


class TemplateCache(Generic[T]):
    """The forms met last; that met last comes first."""

    def __init__(self) -> None:
        self._forms: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return iter(self._forms)

    def add(self, form: T) -> None:
        self._forms.insert(0, form)
        del self._forms[FORMS_MAX:]
