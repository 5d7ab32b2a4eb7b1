"""Tests of signed deltas: an attacker with write access to the store can change none of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from delta_keys import KeyPair, key_pair, replace_file, resealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store.conftest import small_collection
from store.deltas.conftest import line_of, push

from embedserve_store import (
    DeltaWriter,
    ModelStore,
    StoreError,
    compact_deltas,
    copy_versions,
    publish,
    undo_deltas,
)
from embedserve_store.deltas.signing import KEY_VARIABLE, trusted_keys
from embedserve_store.format.delta_manifest import manifest_name, parse_delta
from embedserve_store.format.manifest_checksum import BLANK, sealed_json
from embedserve_store.format.signature import split_signature

LINE_FOLDER = "m/deltas/1"


@pytest.fixture
def signed(store: Path, key_files: KeyPair) -> Path:
    """Returns a store with three signed deltas."""
    with DeltaWriter(store, model="m", key=key_files.private) as writer:
        for _ in range(3):
            push(writer)
    return store


def manifest_path(store: Path, seq: int) -> Path:
    return store / LINE_FOLDER / manifest_name(seq)


def rejection(store: Path, keys: Path, seq: int) -> str:
    with pytest.raises(StoreError) as caught:
        line_of(store, keys).manifest(seq)
    message = str(caught.value)
    assert message.startswith(f"{manifest_path(store, seq)}: ")
    return message


def test_signed_deltas_are_read_with_the_public_key(signed: Path, key_files: KeyPair) -> None:
    deltas = [delta for delta, _ in line_of(signed, key_files.public).deltas()]
    assert [delta.seq for delta in deltas] == [1, 2, 3]
    assert all(len(delta.signature) == 128 for delta in deltas)


def test_signed_bytes_are_the_manifest_without_its_signature(signed: Path) -> None:
    parts = split_signature(manifest_path(signed, 2).read_bytes())
    assert parts is not None
    data = json.loads(manifest_path(signed, 2).read_bytes())
    unsigned, signature = parts
    assert signature.hex() == data.pop("signature")
    sealed = json.loads(unsigned)
    assert sealed | {"sha256": ""} == data | {"sha256": ""}
    assert unsigned == resealed(unsigned, lambda data: None)


def test_signing_key_may_come_from_the_environment_variable(
    store: Path, key_files: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(key_files.private))
    with DeltaWriter(store, model="m") as writer:
        push(writer)
    undo_deltas(store, "m", to=0, why="test")
    assert [one.seq for one, _ in line_of(store, key_files.public).deltas()] == [1, 2]


def test_any_of_several_public_keys_is_accepted(
    signed: Path, key_files: KeyPair, tmp_path: Path
) -> None:
    """Servers trust a new key before the training job has it."""
    new = key_pair(tmp_path, "new")
    with DeltaWriter(signed, model="m", key=new.private) as writer:
        assert push(writer) == 4
    both = tmp_path / "both.pub"
    both.write_bytes(b"the old one\n" + key_files.public.read_bytes() + new.public.read_bytes())
    assert len([*line_of(signed, both).deltas()]) == 4
    assert f"not of a key in {key_files.public}" in rejection(signed, key_files.public, 4)
    assert f"not of a key in {new.public}" in rejection(signed, new.public, 1)


def test_stripped_signature_is_rejected(signed: Path, key_files: KeyPair) -> None:
    path = manifest_path(signed, 2)
    replace_file(path, resealed(path.read_bytes(), lambda data: data.pop("signature")))
    assert f"has no signature of a key in {key_files.public}" in rejection(
        signed, key_files.public, 2
    )


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
def test_changed_manifest_with_a_new_checksum_is_rejected(
    signed: Path, key_files: KeyPair, change: Callable[[dict[str, Any]], object]
) -> None:
    path = manifest_path(signed, 2)
    replace_file(path, resealed(path.read_bytes(), change))
    assert "its signature is not of a key" in rejection(signed, key_files.public, 2)


def test_signature_of_another_delta_is_rejected(signed: Path, key_files: KeyPair) -> None:
    signature = json.loads(manifest_path(signed, 1).read_bytes())["signature"]
    path = manifest_path(signed, 2)
    swapped = resealed(path.read_bytes(), lambda data: data.update(signature=signature))
    replace_file(path, swapped)
    assert "or not of this delta" in rejection(signed, key_files.public, 2)


def test_delta_stored_under_another_seq_is_rejected(signed: Path, key_files: KeyPair) -> None:
    undo_deltas(signed, "m", to=0, why="test", key=key_files.private)
    replace_file(manifest_path(signed, 3), manifest_path(signed, 2).read_bytes())
    assert "not that of a file of delta 3" in rejection(signed, key_files.public, 3)
    replace_file(manifest_path(signed, 5), manifest_path(signed, 4).read_bytes())
    assert "is delta 4 of line 1" in rejection(signed, key_files.public, 5)


@pytest.mark.parametrize(
    ("model", "line", "own"), [("n", 1, {"model": "m"}), ("m", 2, {"line": 1})]
)
def test_signed_delta_of_another_model_or_line_is_rejected(
    signed: Path, key_files: KeyPair, model: str, line: int, own: dict[str, Any]
) -> None:
    """The attacker cannot change the model's name or the line in it, either."""
    publish(small_collection(), signed, model=model)
    with DeltaWriter(signed, model=model, version=line, key=key_files.private) as writer:
        push(writer)
    other = (signed / f"{model}/deltas/{line}" / manifest_name(1)).read_bytes()
    replace_file(manifest_path(signed, 1), other)
    said = f"is delta 1 of line {line} of model '{model}'"
    assert said in rejection(signed, key_files.public, 1)
    replace_file(manifest_path(signed, 1), resealed(other, lambda data: data.update(own)))
    assert "or not of this delta" in rejection(signed, key_files.public, 1)


def test_signed_delta_of_a_forked_line_is_rejected(
    store: Path, key_files: KeyPair, tmp_path: Path
) -> None:
    fork = shutil.copytree(store, tmp_path / "fork")
    for one in (store, fork):
        with DeltaWriter(one, model="m", key=key_files.private) as writer:
            push(writer)
            push(writer)
    replace_file(manifest_path(store, 2), manifest_path(fork, 2).read_bytes())
    with pytest.raises(StoreError, match="does not continue delta 1"):
        list(line_of(store, key_files.public).deltas())


def test_delta_signed_with_another_key_is_rejected(signed: Path, tmp_path: Path) -> None:
    other = key_pair(tmp_path, "other")
    assert f"its signature is not of a key in {other.public}" in rejection(signed, other.public, 1)


@pytest.mark.parametrize(
    "signature",
    ["", "0" * 127, "0" * 129, "A" * 128, "\u0660" * 128, " " * 128, 7, None, ["0" * 128]],
)
def test_malformed_signature_is_rejected(
    signed: Path, key_files: KeyPair, signature: object
) -> None:
    path = manifest_path(signed, 2)
    changed = resealed(path.read_bytes(), lambda data: data.update(signature=signature))
    replace_file(path, changed)
    assert ": signature is " in rejection(signed, key_files.public, 2)
    with pytest.raises(StoreError, match=r"signature is .*, expected"):  # without a key, too
        line_of(signed).manifest(2)


def test_signature_elsewhere_in_the_file_is_ignored(signed: Path, key_files: KeyPair) -> None:
    path = manifest_path(signed, 2)
    data = json.loads(path.read_bytes())
    replace_file(path, sealed_json({"signature": data["signature"]} | data))
    assert "has no signature" in rejection(signed, key_files.public, 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_changed_byte_of_a_signed_manifest_is_rejected(
    signed: Path, key_files: KeyPair, data: st.DataObject
) -> None:
    """The checksum itself is not signed, but it is compared whenever a manifest is read."""
    whole = manifest_path(signed, 2).read_bytes()
    seal = whole.rindex(b'"') - len(BLANK)
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda one: one != whole[at]))
    changed = whole[:at] + bytes([byte]) + whole[at + 1 :]
    compare: Callable[[bytes, str], object] = trusted_keys(key_files.public).check
    if seal <= at < seal + len(BLANK):
        compare = _parse
    with pytest.raises(StoreError):
        compare(changed, "here")


def _parse(text: bytes, where: str) -> object:
    return parse_delta(text, "m", 1, 2, where)


def test_rows_other_than_those_of_the_signed_manifest_are_rejected(
    signed: Path, key_files: KeyPair
) -> None:
    first, second = (
        next((signed / LINE_FOLDER).glob(f"{seq:020d}.*.safetensors")) for seq in (1, 2)
    )
    replace_file(second, first.read_bytes())
    line = line_of(signed, key_files.public)
    with pytest.raises(StoreError, match="changed since it was published"):
        list(line.rows(line.manifest(2)[0]))


def test_signed_line_is_copied_with_its_signatures(
    signed: Path, key_files: KeyPair, tmp_path: Path
) -> None:
    copy_versions(signed, tmp_path / "copy", "m")
    assert len([*line_of(tmp_path / "copy", key_files.public).deltas()]) == 3


def test_compaction_with_a_key_rejects_unsigned_deltas(
    signed: Path, key_files: KeyPair, tmp_path: Path
) -> None:
    assert compact_deltas(signed, "m", key=key_files.public).version == 2
    replace_file(
        manifest_path(signed, 3),
        resealed(manifest_path(signed, 3).read_bytes(), lambda data: data.pop("signature")),
    )
    with pytest.raises(StoreError, match=r"0003\.json: has no signature"):
        compact_deltas(signed, "m", version=1, key=key_files.public)
    assert ModelStore(signed).versions("m") == [1, 2]


def test_unsigned_line_continues_signed_after_compaction(store: Path, key_files: KeyPair) -> None:
    """A version compacted from unsigned deltas continues with signed deltas only."""
    with DeltaWriter(store, model="m") as writer:
        push(writer)
    assert compact_deltas(store, "m").version == 2
    with DeltaWriter(store, model="m", key=key_files.private) as writer:
        assert push(writer) == 2
    assert [one.seq for one, _ in line_of(store, key_files.public, version=2).deltas()] == [2]


def test_signed_line_rejects_unsigned_writers_and_undos(signed: Path, key_files: KeyPair) -> None:
    """Servers that require signatures would stall at an unsigned delta."""
    reason = "delta 3 of line 1 of 'm' is signed, .*: give the private key, as key or by EMBEDS"
    with pytest.raises(StoreError, match=reason):
        DeltaWriter(signed, model="m")
    with pytest.raises(StoreError, match=reason):
        undo_deltas(signed, "m", to=0, why="test")
    assert line_of(signed, key_files.public).seqs() == [1, 2, 3]


def test_undo_is_signed(signed: Path, key_files: KeyPair) -> None:
    made = undo_deltas(signed, "m", to=1, why="test", key=key_files.private)
    assert line_of(signed, key_files.public).manifest(4)[0] == made
    path = manifest_path(signed, 4)
    replace_file(path, resealed(path.read_bytes(), lambda data: data.update(reverts_to=0)))
    assert "or not of this delta" in rejection(signed, key_files.public, 4)
