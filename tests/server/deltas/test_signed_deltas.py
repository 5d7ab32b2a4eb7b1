"""Tests of a follower with a public key: it applies signed deltas, and stops at an unsigned one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from delta_keys import KeyPair, key_pair, replace_file, resealed
from server.deltas.followed import Followed
from server.deltas.test_applier_process import ApplierProcess

from embedserve.deltas.bounded_line import BoundedLine
from embedserve_store import DeltaWriter, undo_deltas
from embedserve_store.deltas.signing import trusted_keys
from embedserve_store.format.delta_manifest import manifest_name


@pytest.fixture
def pair(tmp_path: Path) -> KeyPair:
    return key_pair(tmp_path)


@pytest.fixture
def followed(tmp_path: Path, pair: KeyPair) -> Followed:
    """Returns a line whose training job signs, and a follower that requires signatures."""
    followed = Followed(tmp_path / "store")
    followed.writer = DeltaWriter(tmp_path / "store", model="m", key=pair.private)
    manifest = followed.models.manifest("m")
    followed.line = BoundedLine(followed.models, manifest, trusted_keys(pair.public))
    followed.follower = followed.started()
    return followed


def stall_reason(followed: Followed) -> str:
    """Returns why the follower applies no further delta."""
    assert followed.poll()[0] == "stalled"
    return followed.status.read().reason


def test_signed_deltas_are_applied(followed: Followed) -> None:
    followed.push(1)
    followed.push(2)
    assert (*followed.poll(), followed.changed()) == ("following", 2, {1: 1, 2: 1})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data.pop("signature"), "has no signature of a key in"),
        (lambda data: data.update(step=1), "its signature is not of a key in"),
        (lambda data: data.update(signature="0" * 128), "its signature is not of a key in"),
        (lambda data: data.update(signature="0" * 64), "expected 128 hexadecimal digits"),
    ],
)
def test_missing_or_invalid_signature_stalls_the_line(
    followed: Followed, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    for row in (1, 2, 3):
        followed.push(row)
    path = followed.deltas / manifest_name(2)
    whole = path.read_bytes()
    replace_file(path, resealed(whole, change))
    assert reason in stall_reason(followed)
    assert (followed.live.seq, followed.changed()) == (1, {1: 1})
    assert reason in stall_reason(followed)
    replace_file(path, whole)
    assert followed.poll() == ("following", 3)


def test_signature_of_another_key_stalls_the_line(followed: Followed, tmp_path: Path) -> None:
    key = key_pair(tmp_path, "other").private
    followed.writer = DeltaWriter(tmp_path / "store", model="m", key=key)
    followed.push(1)
    assert "not of a key in" in stall_reason(followed)
    assert followed.changed() == {}


def test_undo_needs_a_valid_signature(followed: Followed, pair: KeyPair, tmp_path: Path) -> None:
    store = followed.models.where
    followed.push(1)
    followed.push(2)
    followed.follower.poll_once()
    undo_deltas(store, "m", to=1, why="forged", key=key_pair(tmp_path, "other").private)
    assert "its signature is not of a key in" in stall_reason(followed)
    assert (followed.live.seq, followed.changed()) == (2, {1: 1, 2: 1})
    (followed.deltas / manifest_name(3)).unlink()
    undo_deltas(store, "m", to=1, why="CTR fell", key=pair.private)
    assert (*followed.poll(), followed.changed()) == ("following", 3, {1: 1})


def test_undo_verifies_signatures_of_deltas_read_again(followed: Followed, pair: KeyPair) -> None:
    """Covers a store that has changed since the deltas were applied."""
    for row in (1, 2, 3):
        followed.push(row, value=row)
    followed.follower.poll_once()
    followed.follower = followed.started()  # which has no former rows in memory
    undo_deltas(followed.models.where, "m", to=1, why="CTR fell", key=pair.private)
    path = followed.deltas / manifest_name(1)
    whole = path.read_bytes()
    replace_file(path, resealed(whole, lambda data: data.pop("signature")))
    assert "has no signature" in stall_reason(followed)
    replace_file(path, whole)
    followed.follower.poll_once()
    assert followed.changed() == {1: 1}


def test_applier_process_verifies_signatures(
    followed: Followed, pair: KeyPair, tmp_path: Path
) -> None:
    followed.push(1)
    path = followed.deltas / manifest_name(1)
    whole = path.read_bytes()
    assert json.loads(whole)["signature"]
    replace_file(path, resealed(whole, lambda data: data.pop("signature")))
    keys = trusted_keys(pair.public)
    applier = ApplierProcess(followed, tmp_path / "store", poll_s=0.01, keys=keys)
    try:
        while not followed.status.read().is_ready:
            assert applier.supervisor.recv(1) == b"\n"
        assert followed.live.seq == 0
        assert "has no signature" in followed.status.read().reason
        replace_file(path, whole)
        while not followed.live.seq:
            assert applier.supervisor.recv(1) == b"\n"
    finally:
        applier.kill()
