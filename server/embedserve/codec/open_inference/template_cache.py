"""Cache of request templates, so that requests with a cached template are not parsed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
FORMS_MAX = 16


class TemplateCache(Generic[T]):
    """Bounded cache of templates. The most recently added template comes first."""

    def __init__(self) -> None:
        self._forms: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return iter(self._forms)

    def add(self, form: T) -> None:
        self._forms.insert(0, form)
        del self._forms[FORMS_MAX:]
