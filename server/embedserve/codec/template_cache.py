"""Cache of request templates, so that a request like an earlier one is not parsed again.

Callers repeat their requests except for the numbers in them. A template is what stays: literal
bytes, with holes where the numbers are. Each codec has templates of its own kind.
"""

from __future__ import annotations

from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")
TEMPLATES_MAX = 16
"""Templates of one cache. A request without a template is compared with all of them."""
BYTES_MAX = 4 << 20
"""Bytes that the templates of one cache take together."""


class TemplateCache(Generic[T]):
    """Bounded cache of templates. The most recently added template comes first.

    The event loop and the codec thread both read it and add to it.

    Attributes:
        templates: the cached templates.
        nbytes: bytes that they take.
    """

    def __init__(self) -> None:
        self.templates: list[T] = []
        self.nbytes = 0
        self._sizes: list[int] = []
        self._lock = Lock()

    def add(self, template: T, nbytes: int) -> None:
        """Adds a template of ``nbytes``. The oldest templates go until all are within
        TEMPLATES_MAX and BYTES_MAX; a template above BYTES_MAX is not added."""
        if nbytes > BYTES_MAX:
            return
        with self._lock:
            self.templates.insert(0, template)
            self._sizes.insert(0, nbytes)
            self.nbytes += nbytes
            while len(self.templates) > TEMPLATES_MAX or self.nbytes > BYTES_MAX:
                self.templates.pop()
                self.nbytes -= self._sizes.pop()
