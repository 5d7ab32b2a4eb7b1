"""Ed25519 keys of deltas, and manifests that an attacker has changed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from embedserve_store.format.manifest_checksum import sealed_json

PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class KeyPair:
    """Files with a private key and its public key."""

    private: Path
    public: Path


def key_pair(folder: Path, name: str = "delta") -> KeyPair:
    key = Ed25519PrivateKey.generate()
    pair = KeyPair(folder / f"{name}.key", folder / f"{name}.pub")
    pair.private.write_bytes(private_pem(key))
    pair.public.write_bytes(public_pem(key))
    return pair


def private_pem(key: Any, password: bytes = b"") -> bytes:
    protection: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        protection = serialization.BestAvailableEncryption(password)
    pem: bytes = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, protection)
    return pem


def public_pem(key: Any) -> bytes:
    of = serialization.PublicFormat.SubjectPublicKeyInfo
    pem: bytes = key.public_key().public_bytes(PEM, of)
    return pem


def resealed(manifest: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Returns a manifest with changed fields and a new seal. The signature stays unchanged."""
    data = json.loads(manifest)
    change(data)
    return sealed_json(data)


def replace_file(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
