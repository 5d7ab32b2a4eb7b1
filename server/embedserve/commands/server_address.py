"""Where commands that ask a running server find it."""

from __future__ import annotations


def address_of(url: str, example: str) -> str:
    """``url`` as an address to put a path behind: http:// where it says nothing else.

    Raises:
        ValueError: it is of another kind; ``example`` says what is meant.

    >>> address_of("localhost:8000/", "")
    'http://localhost:8000'
    """
    address = url if "://" in url else f"http://{url}"
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"url is {url!r}, expected such as {example}")
    return address.rstrip("/")
