"""Tests of delta manifests: the written manifest is read back, and errors name what is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import (
    DELTA_BYTES_MAX,
    DELTA_SEQ_MAX,
    FILE_BYTES_MAX,
    FILES_MAX,
    DeltaFile,
    DeltaManifest,
    IdCounts,
    LinePosition,
    base_checksum,
    check_tables,
    delta_file_name,
    manifest_name,
    parse_delta,
    parse_manifest_name,
    position_of,
)
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.format.table_spec import TableSpec

SHA = "a" * 64
TOKEN = "0123456789abcdef"
FILE = DeltaFile(delta_file_name(5, TOKEN, 0, 0), 1000, SHA, {"user": 3, "item": 2})
DELTA = DeltaManifest(
    "m", 7, 5, SHA, "me@host", TOKEN, 40, "2026-01-02T03:04:05.000006+00:00", (FILE,)
)
USER = TableSpec("user", 10, 4, ("user",), "sum", "float32", SHA)
BASE = Manifest("m", 7, (USER, replace(USER, name="item", feature_names=("item",))), False)


def parse(data: bytes) -> DeltaManifest:
    return parse_delta(data, "m", 7, 5, "here")


def test_round_trip() -> None:
    assert parse(DELTA.to_bytes()) == DELTA
    without_step = replace(DELTA, step=None, files=())
    assert parse(without_step.to_bytes()) == without_step
    undo = replace(DELTA, files=(), reverts_to=3, why="a \u00e4 reason")
    assert parse(undo.to_bytes()) == undo
    assert (DELTA.rows, DELTA.nbytes) == ({"user": 3, "item": 2}, 1000)


def test_manifest_names_sort_by_seq_and_are_parsed_back() -> None:
    names = [manifest_name(seq) for seq in (1, 9, 10, 12345)]
    assert names == sorted(names)
    assert [parse_manifest_name(name) for name in names] == [1, 9, 10, 12345]
    assert parse_manifest_name(manifest_name(DELTA_SEQ_MAX)) == DELTA_SEQ_MAX
    others = "5.json", f".new-{TOKEN}", f"{manifest_name(5)}.x"
    for other in (FILE.name, *map(manifest_name, (0, DELTA_SEQ_MAX + 1)), *others):
        assert parse_manifest_name(other) is None


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    data = json.loads(DELTA.to_bytes())
    change(data)
    return sealed_json(data)


def undo(**fields: Any) -> bytes:
    return edited(lambda data: data.update({"files": [], "reverts_to": 0, "why": ""} | fields))


def edited_file(**fields: Any) -> bytes:
    return edited(lambda data: data["files"][0].update(fields))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (edited(lambda data: data.update(model="other")), "is delta 5 of line 7 of model 'other'"),
        (edited(lambda data: data.update(line=8)), "is delta 5 of line 8"),
        (edited(lambda data: data.update(seq=6)), "is delta 6 of line 7"),
        (edited(lambda data: data.update(seq=True)), "seq is True, expected int"),
        (edited(lambda data: data.update(format_version=1)), "format_version is 1"),
        (edited(lambda data: data.update(previous="a")), "previous is 'a', expected 64 hex"),
        (edited(lambda data: data.update(token="x")), "token is 'x', expected 16 hex"),
        (edited(lambda data: data.update(step="4")), "step is '4', expected int"),
        (edited(lambda data: data.update(as_of="now")), "as_of is 'now', expected a time in UTC"),
        (edited(lambda data: data.update(as_of="2026-01-02T03:04:05+01:00")), "a time in UTC"),
        (edited(lambda data: data.update(as_of="9999-12-31T23:59:59.999999Z")), "a time in UTC"),
        (edited(lambda data: data.update(files={})), "files is {}, expected list"),
        (edited(lambda data: data.update(files=[3])), "files[0]: expected a JSON object"),
        (
            edited_file(name="../5.json"),
            "files[0]: name is '../5.json', not that of a file of delta 5",
        ),
        (edited_file(name=delta_file_name(6, TOKEN, 0, 0)), "not that of a file of delta 5"),
        (edited_file(bytes=0), "files[0]: bytes is 0"),
        (edited_file(bytes=FILE_BYTES_MAX + 1), f"expected 1 to {FILE_BYTES_MAX}"),
        (edited_file(sha256="A" * 64), "expected 64 hexadecimal digits"),
        (edited_file(rows={"user": 0}), "rows: user is 0, expected 1 or more"),
        (edited_file(rows={"user": 1.5}), "user is 1.5, expected int"),
        (edited_file(ids={"user": [1, 0]}), "has both rows and ids, expected one of them"),
        (edited_file(ids={"user": [1]}), "ids: user is [1], expected two counts: new and removed"),
        (edited_file(ids={"user": [1, -1]}), "ids: user is [1, -1], expected two counts"),
        (undo(reverts_to=4), "reverts_to is 4, expected 0 to 3"),
        (undo(reverts_to=-1), "reverts_to is -1, expected 0 to 3"),
        (undo(reverts_to=None), "reverts_to is None, expected int"),
        (undo(reverts_to=True), "reverts_to is True, expected int"),
        (undo(why=3), "why is 3, expected str"),
        (undo(why="x" * 1001), "why has 1001 characters, the limit is 1000"),
        (edited(lambda data: data.update(writer="x" * 1001)), "writer has 1001 characters"),
        (edited(lambda data: data.update(reverts_to=1, why="")), "1, and has files"),
        (b"{}", "format_version is None"),
        (b"[" * 100_000, "not JSON"),
        (DELTA.to_bytes()[:-10], "not JSON, or half-written"),
        (DELTA.to_bytes().replace(b'"step": 40', b'"step": 41'), "changed since it was published"),
        (b" " * ((16 << 20) + 1), "the limit is 16777216"),
    ],
)
def test_invalid_manifest_is_rejected(data: bytes, message: str) -> None:
    with pytest.raises(StoreError, match=r"^here") as caught:
        parse(data)
    assert message in str(caught.value)


def test_manifest_over_the_byte_or_file_limit_is_rejected() -> None:
    largest = replace(FILE, nbytes=FILE_BYTES_MAX)
    too_large = replace(DELTA, files=(largest,) * (DELTA_BYTES_MAX // FILE_BYTES_MAX + 1))
    with pytest.raises(StoreError, match=f"the limit is {DELTA_BYTES_MAX}"):
        parse(too_large.to_bytes())
    with pytest.raises(StoreError, match=f"files has 10001 entries, the limit is {FILES_MAX}"):
        parse(replace(DELTA, files=(FILE,) * 10001).to_bytes())


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(DELTA.to_bytes()) - 1), byte=st.integers(0, 255))
def test_any_changed_byte_is_detected(at: int, byte: int) -> None:
    data = bytearray(DELTA.to_bytes())
    if data[at] == byte:
        return
    data[at] = byte
    with pytest.raises(StoreError, match=r"^here"):
        parse(bytes(data))


def test_tables_that_do_not_fit_the_version_are_rejected() -> None:
    check_tables(DELTA, BASE, "here")
    unknown = replace(DELTA, files=(replace(FILE, rows={"shop": 1}),))
    with pytest.raises(StoreError, match=r"here: table 'shop' is not one of version 7; tables are"):
        check_tables(unknown, BASE, "here")
    too_many = replace(DELTA, files=(replace(FILE, rows={"user": 11}),))
    with pytest.raises(StoreError, match=r"table 'user': 11 rows, the table has 10"):
        check_tables(too_many, BASE, "here")
    no_vocabulary = replace(DELTA, files=(replace(FILE, rows={}, ids={"user": IdCounts(1)}),))
    with pytest.raises(StoreError, match=r"table 'user': ids change, but the table has no vocab"):
        check_tables(no_vocabulary, BASE, "here")


def test_line_position_of_published_and_compacted_versions() -> None:
    assert position_of(BASE) == LinePosition(7, 0, base_checksum(BASE))
    position = LinePosition(7, 1234, SHA)
    compacted = replace(BASE, version=9, source={"kind": "deltas"} | position.to_source())
    assert position_of(compacted) == position
    for wrong in ({"line": 0}, {"line_seq": "1"}, {"line_seq": 1 << 32}, {"line_checksum": "?"}):
        source = position.to_source() | wrong
        with pytest.raises(StoreError, match="version 9 of 'm': source: "):
            position_of(replace(compacted, source=source))


def test_base_checksum_depends_on_rows_and_not_on_version_numbers() -> None:
    assert base_checksum(replace(BASE, version=8)) == base_checksum(BASE)
    other = (replace(USER, sha256="b" * 64), BASE.tables[1])
    assert base_checksum(replace(BASE, tables=other)) != base_checksum(BASE)
