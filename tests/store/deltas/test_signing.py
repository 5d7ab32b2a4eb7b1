"""Tests of signed deltas: an attacker with write access to the store can change none of them."""

from __future__ import annotations

import json
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
from delta_keys import KeyPair, key_pair, private_pem, public_pem, replace_file, resealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store.conftest import small_collection
from store.deltas.conftest import rows

import embedserve_store
from embedserve_store import (
    DeltaLine,
    DeltaWriter,
    ModelStore,
    StoreError,
    compact_deltas,
    copy_versions,
    publish,
    undo_deltas,
)
from embedserve_store.deltas.signing import (
    KEY_BYTES_MAX,
    KEY_VARIABLE,
    KEYS_MAX,
    signing_key,
    trusted_keys,
)
from embedserve_store.format.delta_manifest import manifest_name, parse_delta
from embedserve_store.format.manifest_checksum import BLANK, sealed_json
from embedserve_store.format.signature import split_signature

PLACE = "m/deltas/1"


@pytest.fixture
def pair(tmp_path: Path) -> KeyPair:
    return key_pair(tmp_path)


@pytest.fixture
def signed(store: Path, pair: KeyPair) -> Path:
    """Returns a store with three signed deltas."""
    with DeltaWriter(store, model="m", key=pair.private) as writer:
        for _ in range(3):
            push(writer)
    return store


def push(writer: DeltaWriter) -> int:
    return writer.push_rows({"tag": ([writer.seq], rows("tag", 1, seed=writer.seq))})


def line_of(store: Path, keys: Path, version: int = 1) -> DeltaLine:
    models = ModelStore(store)
    return DeltaLine(models, models.manifest("m", version), trusted_keys(keys))


def manifest(store: Path, seq: int) -> Path:
    return store / PLACE / manifest_name(seq)


def refusal(store: Path, keys: Path, seq: int) -> str:
    with pytest.raises(StoreError) as caught:
        line_of(store, keys).manifest(seq)
    message = str(caught.value)
    assert message.startswith(f"{manifest(store, seq)}: ")
    return message


def test_signed_deltas_are_read_with_the_public_key(signed: Path, pair: KeyPair) -> None:
    deltas = [delta for delta, _ in line_of(signed, pair.public).deltas()]
    assert [delta.seq for delta in deltas] == [1, 2, 3]
    assert all(len(delta.signature) == 128 for delta in deltas)


def test_the_signed_bytes_are_those_of_the_manifest_without_its_signature(signed: Path) -> None:
    parts = split_signature(manifest(signed, 2).read_bytes())
    assert parts is not None
    data = json.loads(manifest(signed, 2).read_bytes())
    unsigned, signature = parts
    assert signature.hex() == data.pop("signature")
    sealed = json.loads(unsigned)
    assert sealed | {"sha256": ""} == data | {"sha256": ""}
    assert unsigned == resealed(unsigned, lambda data: None)


def test_a_key_may_come_from_the_variable(
    store: Path, pair: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(pair.private))
    with DeltaWriter(store, model="m") as writer:
        push(writer)
    undo_deltas(store, "m", to=0, why="test")
    assert [one.seq for one, _ in line_of(store, pair.public).deltas()] == [1, 2]


def test_any_of_several_public_keys_will_do(signed: Path, pair: KeyPair, tmp_path: Path) -> None:
    """Servers trust a new key before the training job has it."""
    new = key_pair(tmp_path, "new")
    with DeltaWriter(signed, model="m", key=new.private) as writer:
        assert push(writer) == 4
    both = tmp_path / "both.pub"
    both.write_bytes(b"the old one\n" + pair.public.read_bytes() + new.public.read_bytes())
    assert len([*line_of(signed, both).deltas()]) == 4
    assert f"not of a key in {pair.public}" in refusal(signed, pair.public, 4)
    assert f"not of a key in {new.public}" in refusal(signed, new.public, 1)


def test_a_stripped_signature_is_missed(signed: Path, pair: KeyPair) -> None:
    path = manifest(signed, 2)
    replace_file(path, resealed(path.read_bytes(), lambda data: data.pop("signature")))
    assert f"has no signature of a key in {pair.public}" in refusal(signed, pair.public, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(step=7),
        lambda data: data["files"][0].update(sha256="0" * 64),
        lambda data: data["files"][0].update(rows={"tag": 2}),
        lambda data: data.update(previous="0" * 64),
        lambda data: data.update(as_of="2030-01-01T00:00:00+00:00"),
        lambda data: data["files"].clear(),
    ],
)
def test_a_manifest_that_is_sealed_again_is_refused(
    signed: Path, pair: KeyPair, change: Callable[[dict[str, Any]], object]
) -> None:
    path = manifest(signed, 2)
    replace_file(path, resealed(path.read_bytes(), change))
    assert "its signature is not of a key" in refusal(signed, pair.public, 2)


def test_the_signature_of_another_delta_is_refused(signed: Path, pair: KeyPair) -> None:
    signature = json.loads(manifest(signed, 1).read_bytes())["signature"]
    path = manifest(signed, 2)
    swapped = resealed(path.read_bytes(), lambda data: data.update(signature=signature))
    replace_file(path, swapped)
    assert "or not of this delta" in refusal(signed, pair.public, 2)


def test_a_delta_in_the_place_of_another_is_refused(signed: Path, pair: KeyPair) -> None:
    undo_deltas(signed, "m", to=0, why="test", key=pair.private)
    replace_file(manifest(signed, 3), manifest(signed, 2).read_bytes())
    assert "not that of a file of delta 3" in refusal(signed, pair.public, 3)
    replace_file(manifest(signed, 5), manifest(signed, 4).read_bytes())
    assert "is delta 4 of line 1" in refusal(signed, pair.public, 5)


def test_a_signed_delta_of_another_model_is_refused(
    signed: Path, pair: KeyPair, tmp_path: Path
) -> None:
    """The attacker cannot change the model's name in it, either."""
    publish(small_collection(), signed, model="n")
    with DeltaWriter(signed, model="n", key=pair.private) as writer:
        push(writer)
    other = (signed / "n/deltas/1" / manifest_name(1)).read_bytes()
    replace_file(manifest(signed, 1), other)
    assert "is delta 1 of line 1 of model 'n'" in refusal(signed, pair.public, 1)
    replace_file(manifest(signed, 1), resealed(other, lambda data: data.update(model="m")))
    assert "or not of this delta" in refusal(signed, pair.public, 1)


def test_a_signed_delta_of_another_line_is_refused(signed: Path, pair: KeyPair) -> None:
    publish(small_collection(), signed, model="m")
    with DeltaWriter(signed, model="m", version=2, key=pair.private) as writer:
        push(writer)
    other = (signed / "m/deltas/2" / manifest_name(1)).read_bytes()
    replace_file(manifest(signed, 1), other)
    assert "is delta 1 of line 2" in refusal(signed, pair.public, 1)
    replace_file(manifest(signed, 1), resealed(other, lambda data: data.update(line=1)))
    assert "or not of this delta" in refusal(signed, pair.public, 1)


def test_a_signed_delta_of_another_history_does_not_continue_this_one(
    store: Path, pair: KeyPair, tmp_path: Path
) -> None:
    fork = shutil.copytree(store, tmp_path / "fork")
    for one in (store, fork):
        with DeltaWriter(one, model="m", key=pair.private) as writer:
            push(writer)
            push(writer)
    replace_file(manifest(store, 2), manifest(fork, 2).read_bytes())
    with pytest.raises(StoreError, match="does not continue delta 1"):
        list(line_of(store, pair.public).deltas())


def test_another_key_is_refused(signed: Path, tmp_path: Path) -> None:
    other = key_pair(tmp_path, "other")
    assert f"its signature is not of a key in {other.public}" in refusal(signed, other.public, 1)


@pytest.mark.parametrize(
    "signature",
    ["", "0" * 127, "0" * 129, "A" * 128, "\u0660" * 128, " " * 128, 7, None, ["0" * 128]],
)
def test_a_malformed_signature_is_refused(signed: Path, pair: KeyPair, signature: object) -> None:
    path = manifest(signed, 2)
    changed = resealed(path.read_bytes(), lambda data: data.update(signature=signature))
    replace_file(path, changed)
    assert ": signature is " in refusal(signed, pair.public, 2)
    models = ModelStore(signed)
    with pytest.raises(StoreError, match=r"signature is .*, expected"):  # without a key, too
        DeltaLine(models, models.manifest("m")).manifest(2)


def test_a_signature_elsewhere_in_the_file_counts_for_nothing(signed: Path, pair: KeyPair) -> None:
    path = manifest(signed, 2)
    data = json.loads(path.read_bytes())
    replace_file(path, sealed_json({"signature": data["signature"]} | data))
    assert "has no signature" in refusal(signed, pair.public, 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_byte_of_a_signed_manifest_can_change(
    signed: Path, pair: KeyPair, data: st.DataObject
) -> None:
    """The checksum itself is not signed, but it is compared whenever a manifest is read."""
    whole = manifest(signed, 2).read_bytes()
    seal = whole.rindex(b'"') - len(BLANK)
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda one: one != whole[at]))
    changed = whole[:at] + bytes([byte]) + whole[at + 1 :]
    compare: Callable[[bytes, str], object] = trusted_keys(pair.public).check
    if seal <= at < seal + len(BLANK):
        compare = _parse
    with pytest.raises(StoreError):
        compare(changed, "here")


def _parse(text: bytes, where: str) -> object:
    return parse_delta(text, "m", 1, 2, where)


def test_rows_that_the_signed_manifest_does_not_mean_are_refused(
    signed: Path, pair: KeyPair
) -> None:
    first, second = (next((signed / PLACE).glob(f"{seq:020d}.*.safetensors")) for seq in (1, 2))
    replace_file(second, first.read_bytes())
    line = line_of(signed, pair.public)
    with pytest.raises(StoreError, match="changed since it was published"):
        list(line.rows(line.manifest(2)[0]))


def test_a_signed_line_is_copied_with_its_signatures(
    signed: Path, pair: KeyPair, tmp_path: Path
) -> None:
    copy_versions(signed, tmp_path / "copy", "m")
    assert len([*line_of(tmp_path / "copy", pair.public).deltas()]) == 3


def test_only_signed_deltas_are_compacted(signed: Path, pair: KeyPair, tmp_path: Path) -> None:
    assert compact_deltas(signed, "m", key=pair.public).version == 2
    replace_file(
        manifest(signed, 3),
        resealed(manifest(signed, 3).read_bytes(), lambda data: data.pop("signature")),
    )
    with pytest.raises(StoreError, match=r"0003\.json: has no signature"):
        compact_deltas(signed, "m", version=1, key=pair.public)
    assert ModelStore(signed).versions("m") == [1, 2]


def test_an_unsigned_line_becomes_a_signed_one(store: Path, pair: KeyPair) -> None:
    """A version compacted from unsigned deltas continues with signed deltas only."""
    with DeltaWriter(store, model="m") as writer:
        push(writer)
    assert compact_deltas(store, "m").version == 2
    with DeltaWriter(store, model="m", key=pair.private) as writer:
        assert push(writer) == 2
    assert [one.seq for one, _ in line_of(store, pair.public, version=2).deltas()] == [2]


def test_a_signed_line_stays_signed(signed: Path, pair: KeyPair) -> None:
    """Servers that require signatures would stall at an unsigned delta."""
    reason = "delta 3 of line 1 of 'm' is signed, .*: give the private key, as key or by EMBEDS"
    with pytest.raises(StoreError, match=reason):
        DeltaWriter(signed, model="m")
    with pytest.raises(StoreError, match=reason):
        undo_deltas(signed, "m", to=0, why="test")
    assert line_of(signed, pair.public).seqs() == [1, 2, 3]


def test_an_undo_is_signed(signed: Path, pair: KeyPair) -> None:
    made = undo_deltas(signed, "m", to=1, why="test", key=pair.private)
    assert line_of(signed, pair.public).manifest(4)[0] == made
    path = manifest(signed, 4)
    replace_file(path, resealed(path.read_bytes(), lambda data: data.update(reverts_to=0)))
    assert "or not of this delta" in refusal(signed, pair.public, 4)


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
def test_a_file_without_usable_public_keys_is_refused(
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
def test_a_file_without_a_usable_private_key_stops_the_writer(
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


def test_without_the_package_the_extra_is_named(
    pair: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "cryptography":
            monkeypatch.setitem(sys.modules, name, None)
    extra = r"pip install 'embedserve\[signatures\]'"
    with pytest.raises(StoreError, match=extra):
        trusted_keys(pair.public)
    with pytest.raises(StoreError, match=extra):
        signing_key(pair.private)


def test_without_a_key_the_package_is_not_imported(store: Path, pair: KeyPair) -> None:
    code = (
        "import sys; from embedserve_store import undo_deltas, DeltaLine, ModelStore\n"
        f"models = ModelStore({str(store)!r})\n"
        "list(DeltaLine(models, models.manifest('m')).deltas())\n"
        "print('cryptography' in sys.modules)"
    )
    root = str(Path(embedserve_store.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root}
    with DeltaWriter(store, model="m", key=pair.private) as writer:
        push(writer)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.stdout, done.stderr) == (b"False\n", b"")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_keys_are_those_that_the_documented_commands_make(store: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/deltas.md").read_text()
    commands = [line for line in text.splitlines() if line.startswith("    openssl ")]
    assert len(commands) == 2
    for command in commands:
        subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
    with DeltaWriter(store, model="m", key=tmp_path / "delta.key") as writer:
        push(writer)
    assert len([*line_of(store, tmp_path / "delta.pub").deltas()]) == 1
