"""Tests of the checksum in manifest.json: it detects every changed bit or space."""

import json
from pathlib import Path
from typing import Any

import pytest

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest_checksum import check_seal, is_sealed, sealed_json
from embedserve_store.model_version import ModelVersion


@pytest.fixture
def folder(version: ModelVersion) -> Path:
    return version.path


def test_every_flipped_bit_of_a_manifest_invalidates_its_checksum(folder: Path) -> None:
    text = (folder / "manifest.json").read_bytes()
    check_seal(text, "m")
    for position in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[position] ^= 1 << bit
            try:
                check_seal(bytes(changed), "m")
            except (StoreError, ValueError):  # ValueError: the text is no longer JSON
                continue
            pytest.fail(f"bit {bit} of byte {position}")


def test_changed_whitespace_in_a_manifest_invalidates_its_checksum(folder: Path) -> None:
    text = (folder / "manifest.json").read_bytes()
    with pytest.raises(StoreError, match=r"m: sha256 is .* changed since it was published"):
        check_seal(json.dumps(json.loads(text)).encode(), "m")


@pytest.mark.parametrize("digest", [None, 7, "", "0" * 63, "A" * 64])
def test_malformed_checksum_is_rejected(digest: Any) -> None:
    with pytest.raises(StoreError, match=r"m: sha256 is .* expected 64 hexadecimal digits"):
        check_seal(json.dumps({"format_version": 2, "sha256": digest}).encode(), "m")


def test_sealing_again_returns_the_same_bytes(folder: Path) -> None:
    text = (folder / "manifest.json").read_bytes()
    assert sealed_json(json.loads(text)) == text


def test_manifest_that_already_holds_64_zeros_can_be_sealed() -> None:
    text = sealed_json({"format_version": 2, "source": "0" * 64})
    check_seal(text, "m")
    assert json.loads(text)["source"] == "0" * 64


def test_manifest_of_format_version_1_needs_no_checksum() -> None:
    text = json.dumps({"format_version": 1}).encode()
    assert not is_sealed(text)
    check_seal(text, "m")
