"""Tests of the files with the keys that sign and verify deltas."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from delta_keys import KeyPair, private_pem, public_pem
from store.deltas.conftest import line_of, push

import embedserve_store
from embedserve_store import DeltaWriter, StoreError, undo_deltas
from embedserve_store.deltas.signing import KEY_BYTES_MAX, KEYS_MAX, signing_key, trusted_keys


def pem_of(make: Callable[[], Any]) -> tuple[bytes, bytes]:
    key = make()
    return private_pem(key), public_pem(key)


RSA = pem_of(lambda: rsa.generate_private_key(65537, 2048))
EC = pem_of(lambda: ec.generate_private_key(ec.SECP256R1()))
ED = pem_of(Ed25519PrivateKey.generate)
BROKEN = b"-----BEGIN %s KEY-----\nc2VjcmV0\n-----END %s KEY-----\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has 0 public keys in PEM, expected 1 to 16"),
        (b"\xff\x00 garbage", "has 0 public keys"),
        (BROKEN % (b"PUBLIC", b"PUBLIC"), "has no key in PEM that can be read"),
        (RSA[1], "key 1 is no Ed25519 key"),
        (ED[1] + EC[1], "key 2 is no Ed25519 key"),
        (ED[0], "has a private key, which belongs to training alone"),
        (ED[1] * (KEYS_MAX + 1), f"has {KEYS_MAX + 1} public keys"),
        (ED[1].ljust(KEY_BYTES_MAX + 1), f"over {KEY_BYTES_MAX} bytes"),
        (None, "cannot be read: No such file"),
    ],
)
def test_file_without_usable_public_keys_is_rejected(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "key.pub"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=f"^delta key {path}: {reason}"):
        trusted_keys(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has no private key in PEM"),
        (ED[1], "has no private key in PEM"),
        (BROKEN % (b"PRIVATE", b"PRIVATE"), "has no key in PEM that can be read"),
        (RSA[0], "is no Ed25519 key"),
        (private_pem(Ed25519PrivateKey.generate(), b"secret"), "the key has a password"),
        (ED[0].ljust(KEY_BYTES_MAX + 1), f"over {KEY_BYTES_MAX} bytes"),
        (None, "cannot be read: No such file"),
    ],
)
def test_file_without_a_usable_private_key_is_rejected(
    store: Path, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "the.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=f"^signing key {path}: {reason}") as caught:
        DeltaWriter(store, model="m", key=path)
    assert "c2VjcmV0" not in str(caught.value)  # no part of the key
    with pytest.raises(StoreError, match=reason):
        undo_deltas(store, "m", to=0, why="test", key=path)


def test_missing_cryptography_package_is_reported_with_its_extra(
    key_files: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "cryptography":
            monkeypatch.setitem(sys.modules, name, None)
    extra = r"pip install 'embedserve\[signatures\]'"
    with pytest.raises(StoreError, match=extra):
        trusted_keys(key_files.public)
    with pytest.raises(StoreError, match=extra):
        signing_key(key_files.private)


def test_cryptography_is_not_imported_without_a_key(store: Path, key_files: KeyPair) -> None:
    code = (
        "import sys; from embedserve_store import undo_deltas, DeltaLine, ModelStore\n"
        f"models = ModelStore({str(store)!r})\n"
        "list(DeltaLine(models, models.manifest('m')).deltas())\n"
        "print('cryptography' in sys.modules)"
    )
    root = str(Path(embedserve_store.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root}
    with DeltaWriter(store, model="m", key=key_files.private) as writer:
        push(writer)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.stdout, done.stderr) == (b"False\n", b"")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_keys_made_by_the_documented_commands_are_accepted(store: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/deltas.md").read_text()
    commands = [line for line in text.splitlines() if line.startswith("    openssl ")]
    assert len(commands) == 2
    for command in commands:
        subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
    with DeltaWriter(store, model="m", key=tmp_path / "delta.key") as writer:
        push(writer)
    assert len([*line_of(store, tmp_path / "delta.pub").deltas()]) == 1
