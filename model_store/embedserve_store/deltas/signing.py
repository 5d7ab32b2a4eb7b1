"""Signs the manifests of deltas, and verifies their signatures: Ed25519 keys in PEM files.

A manifest names its model, line, seq, the manifest before, and sizes and checksums of its files. So
a signature stands for all bytes of the delta and for its place. The package cryptography is an
extra, which is imported only with a key. No message contains anything of a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import DeltaManifest
from embedserve_store.format.signature import split_signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

KEY_VARIABLE = "EMBEDSERVE_DELTA_SIGNING_KEY"
"""Environment variable with the path of the private key."""
KEY_BYTES_MAX = 64 << 10
KEYS_MAX = 16
"""Maximum number of public keys in a file."""
_CONTEXT = b"embedserve delta\0"
"""Precedes the signed bytes, so that the signature is of no use elsewhere."""
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_PRIVATE = b"PRIVATE KEY-----"

KeyFile = str | os.PathLike[str]


class SigningKey:
    """Private key of a training job."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def sign(self, delta: DeltaManifest) -> DeltaManifest:
        """Returns ``delta`` with its signature."""
        unsigned = replace(delta, signature="").to_bytes()
        return replace(delta, signature=self._key.sign(_CONTEXT + unsigned).hex())


class TrustedKeys:
    """Public keys that may have signed a delta."""

    def __init__(self, keys: tuple[Ed25519PublicKey, ...], path: KeyFile) -> None:
        """
        Args:
            path: file of the keys, for errors.
        """
        self._keys, self._path = keys, os.fspath(path)

    def check(self, manifest: bytes, where: str) -> None:
        """Raises StoreError unless one of the keys has signed ``manifest``, the bytes of the
        file."""
        parts = split_signature(manifest)
        if parts is None:
            raise StoreError(f"{where}: has no signature of a key in {self._path}")
        if not any(_is_signed(key, *parts) for key in self._keys):
            raise StoreError(
                f"{where}: its signature is not of a key in {self._path}, or not of this delta"
            )


def check_stays_signed(last: DeltaManifest, key: SigningKey | None) -> None:
    """Raises StoreError for a delta without signature after a signed one, at which servers that
    require signatures would stall.

    Args:
        last: last delta of the line.
        key: key of the delta that is to follow.
    """
    if last.signature and key is None:
        raise StoreError(
            f"delta {last.seq} of line {last.line} of {last.model!r} is signed, and a signed line "
            f"stays signed: give the private key, as key or by {KEY_VARIABLE}"
        )


def signing_key(path: KeyFile | None) -> SigningKey | None:
    """Returns the private key in the PEM file ``path``, else in that of the variable KEY_VARIABLE.

    Returns None if neither is given.

    Raises:
        StoreError: the file cannot be read, or has no Ed25519 key without a password; or the
            package cryptography is missing.
    """
    path = path or os.environ.get(KEY_VARIABLE)
    if not path:
        return None
    where = f"signing key {os.fspath(path)}"
    data = _read(path, where)
    if _PRIVATE not in data:
        raise StoreError(f"{where}: has no private key in PEM")
    serialization, ed25519 = _cryptography(where)
    key = _loaded(partial(serialization.load_pem_private_key, data, password=None), where)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise StoreError(f"{where}: is no Ed25519 key")
    return SigningKey(key)


def trusted_keys(path: KeyFile) -> TrustedKeys:
    """Returns the public keys in the PEM file ``path``, one after another.

    Raises:
        StoreError: as signing_key, of public keys.
    """
    where = f"delta key {os.fspath(path)}"
    data = _read(path, where)
    if _PRIVATE in data:
        raise StoreError(
            f"{where}: has a private key, which belongs to training alone: write the public one by "
            "openssl pkey -pubout"
        )
    blocks = _PUBLIC.findall(data)
    if not 1 <= len(blocks) <= KEYS_MAX:
        raise StoreError(f"{where}: has {len(blocks)} public keys in PEM, expected 1 to {KEYS_MAX}")
    serialization, ed25519 = _cryptography(where)
    keys: list[Ed25519PublicKey] = []
    for block in blocks:
        key = _loaded(partial(serialization.load_pem_public_key, block), where)
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise StoreError(f"{where}: key {len(keys) + 1} is no Ed25519 key")
        keys.append(key)
    return TrustedKeys(tuple(keys), path)


def _is_signed(key: Ed25519PublicKey, manifest: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, _CONTEXT + manifest)
    except InvalidSignature:
        return False
    return True


def _read(path: KeyFile, where: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(KEY_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: the path has a null
        raise StoreError(f"{where}: cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(data) > KEY_BYTES_MAX:
        raise StoreError(f"{where}: over {KEY_BYTES_MAX} bytes: it is no key")
    return data


def _cryptography(where: str) -> tuple[Any, Any]:
    """Returns the modules serialization and ed25519 of the package cryptography."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise StoreError(
            f"{where}: signatures need the package cryptography: "
            "pip install 'embedserve[signatures]'"
        ) from error
    return serialization, ed25519


def _loaded(load: Callable[[], Any], where: str) -> Any:
    """Returns a key. Its error names no detail, which could be of the key's bytes."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load()
    except TypeError:
        raise StoreError(f"{where}: the key has a password: write it without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise StoreError(f"{where}: has no key in PEM that can be read") from None
