"""Tests of vocabularies: each format is read to the same entries, and errors name the line or
entry."""

import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.ids.string_hashes import hash_strings
from embedserve_store.ids.vocabulary import read_vocabulary

EXTREMES = [7, -(2**63), 2**63 - 1, 0, -1]
STRINGS = ["tt0114709", "", " spaced ", 'quo"ted, twice', "Zürich"]


def write(path: Path, content: Any) -> Path:
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8", newline="")
    return path


def read(path: Path, id_type: str = "int64", rows: int = 10) -> dict[int, int]:
    ids, numbers = read_vocabulary(path, id_type, rows, "movie")
    assert ids.dtype == numbers.dtype == np.int64
    assert ids.shape == numbers.shape
    return dict(zip(ids.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("v.npy", np.array(EXTREMES)),
        ("v.npy", np.array(EXTREMES, ">i8")),
        ("v.txt", "".join(f"{one}\n" for one in EXTREMES)),
        ("v.txt", "\ufeff" + "\r\n".join(map(str, EXTREMES))),
        ("v.json", json.dumps(EXTREMES)),
        ("v.json", json.dumps([str(one) for one in EXTREMES])),
    ],
)
def test_position_of_an_id_is_its_row(tmp_path: Path, name: str, content: Any) -> None:
    expected = {one: row for row, one in enumerate(EXTREMES)}
    assert read(write(tmp_path / name, content), rows=5) == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("v.csv", "id,row\n7,3\n-1,0\n 0 ,3\n"),
        ("v.csv", '\ufeffid,row\r\n"7",3\r\n-1,0\r\n0,3'),
        ("v.json", '{"7": 3, "-1": 0, "0": 3}'),
    ],
)
def test_explicit_rows_are_read(tmp_path: Path, name: str, content: str) -> None:
    assert read(write(tmp_path / name, content)) == {7: 3, -1: 0, 0: 3}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "uint64"])
def test_npy_of_other_integer_dtypes_is_accepted(tmp_path: Path, dtype: str) -> None:
    assert read(write(tmp_path / "v.npy", np.array([5, 3, 100], dtype))) == {5: 0, 3: 1, 100: 2}


def test_strings_are_read_verbatim_from_every_format(tmp_path: Path) -> None:
    expected = dict(zip(hash_strings(STRINGS).tolist(), range(5), strict=True))
    as_csv = "id,row\n" + "".join(
        '"{}",{}\n'.format(one.replace('"', '""'), row) for row, one in enumerate(STRINGS)
    )
    for name, content in (
        ("v.txt", "\n".join(STRINGS)),
        ("w.txt", "\r\n".join(STRINGS) + "\r\n"),
        ("v.json", json.dumps(STRINGS)),
        ("w.json", json.dumps({one: row for row, one in enumerate(STRINGS)})),
        ("v.csv", as_csv),
    ):
        assert read(write(tmp_path / name, content), "string", rows=5) == expected


def test_numeric_strings_are_hashed_as_strings(tmp_path: Path) -> None:
    path = write(tmp_path / "v.txt", "7\n07\n")
    assert read(path, "string") == dict(
        zip(hash_strings(["7", "07"]).tolist(), [0, 1], strict=True)
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [("v.npy", np.zeros(0, np.int64)), ("v.txt", ""), ("v.csv", "id,row\n"), ("v.json", "[]")],
)
def test_empty_vocabulary_is_accepted(tmp_path: Path, name: str, content: Any) -> None:
    assert read(write(tmp_path / name, content)) == {}


def test_lines_spanning_many_blocks_are_read(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).permutation(200_000) - 100_000
    path = write(tmp_path / "v.txt", "\n".join(map(str, ids)))
    found, rows = read_vocabulary(path, "int64", 200_000, "movie")
    np.testing.assert_array_equal(found, ids)
    np.testing.assert_array_equal(rows, np.arange(200_000))


TOO_LONG = "9" * 5000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.txt", "7\nseven\n", "line 2: 'seven' is not an integer; .* `id_type: string`$"),
        ("v.txt", "7\n\n8", "line 2: '' is not an integer"),
        ("v.txt", "1_000", "line 1: '1_000' is not an integer"),
        ("v.txt", "١٢", "line 1: '١٢' is not an integer"),
        ("v.txt", "7\n9223372036854775808", "line 2: '9223372036854775808' is outside int64"),
        ("v.txt", "-9223372036854775809", "line 1: '-9223372036854775809' is outside int64"),
        ("v.txt", TOO_LONG, "line 1: '9{79}… is outside int64"),
        ("v.txt", "7\n8\n9\n7\n", "line 4: id '7' is there twice, first at 1"),
        ("v.txt", "7\n+7\n", r"line 2: id '\+7' is there twice, first at 1"),
        ("v.txt", "\n".join(map(str, range(12))), "line 11: more ids than the table's 10 rows"),
        ("v.txt", b"7\n\xff\n", "not a vocabulary in txt: 'utf-8' codec"),
        ("v.csv", "row,id\n7,3\n", "line 1 is 'row,id', expected id,row"),
        ("v.csv", "", "line 1 is '', expected id,row"),
        ("v.csv", "id,row\n7\n", "line 2 has 1 columns, expected 2"),
        ("v.csv", "id,row\n7,ten\n", "line 2: 'ten' is not an integer$"),
        ("v.csv", "id,row\nten,7\n", "line 2: 'ten' is not an integer; .* `id_type: string`$"),
        ("v.csv", "id,row\n7,3\n8,10\n", "line 3: row 10 is not one of the table's 0 to 9"),
        ("v.csv", "id,row\n7,-1\n", "line 2: row -1 is not one of the table's 0 to 9"),
        ("v.csv", "id,row\n7,3\n8,4\n7,4\n", "line 4: id '7' is there twice, first at 2"),
        ("v.csv", 'id,row\n"7', "not a vocabulary in csv: unexpected end of data"),
        ("v.json", "[7, 8, 7]", "entry 2: id 7 is there twice, first at 0"),
        ("v.json", '{"7": 0, "8": 1, "7": 1}', "entry 2: id '7' is there twice, first at 0"),
        ("v.json", "[7, 8.0]", r"entry 1: 8\.0 is not an integer$"),
        ("v.json", "[true]", "entry 0: True is not an integer"),
        ("v.json", "[[7]]", r"entry 0: \[7\] is not an integer"),
        ("v.json", "[9223372036854775808]", "entry 0: 9223372036854775808 is outside int64"),
        ("v.json", '{"7": null}', "entry 0: None is not an integer"),
        ("v.json", '{"7": 10}', "entry 0: row 10 is not one of the table's 0 to 9"),
        ("v.json", '"7"', "expected a list of ids, or an object of rows by id"),
        ("v.json", "[7", "not a vocabulary in json: "),
        ("v.json", "[" * 100_000, "not a vocabulary in json: "),
        ("v.npy", np.arange(11), "holds 11 ids, the table has 10 rows"),
        ("v.npy", np.array([1.0]), r"holds float64 \[1\], expected int64 \[ids\]"),
        ("v.npy", np.array([True]), "holds bool"),
        ("v.npy", np.zeros((2, 2), np.int64), r"holds int64 \[2, 2\]"),
        ("v.npy", np.array([1, 2**63], np.uint64), "entry 1: 9223372036854775808 is outside int64"),
        ("v.npy", np.array([5, 6, 5]), "entry 2: id 5 is there twice, first as entry 0"),
        ("v.npy", b"PK\x03\x04 no array", "not a vocabulary in npy: "),
        ("v.npy", b"", "not a vocabulary in npy: "),
        ("v.txt.gz", b"", "expected .npy, .txt, .csv or .json"),
    ],
)
def test_invalid_vocabulary_error_names_line_or_entry(
    tmp_path: Path, name: str, content: Any, message: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(InvalidModelError, match=f"^table 'movie': {path}: .*{message}") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.txt", "a\nb\na\n", "line 3: id 'a' is there twice, first at 1"),
        ("v.json", '["a", 7]', "entry 1: 7 is not a string"),
        ("v.json", '["a", "\\ud800"]', r"v.json: '\\ud800' is no text"),
        ("v.npy", np.arange(3), "holds no strings: write them as .txt, .csv or .json"),
    ],
)
def test_invalid_string_vocabulary_error_names_line_or_entry(
    tmp_path: Path, name: str, content: Any, message: str
) -> None:
    with pytest.raises(InvalidModelError, match=message):
        read(write(tmp_path / name, content), "string")


def test_strings_with_colliding_hashes_are_rejected_by_name(tmp_path: Path) -> None:
    # XXH3, run backwards, found these strings.
    path = write(tmp_path / "v.txt", "yixsixcr\ndog\nLaGdmnP\n")
    with pytest.raises(InvalidModelError, match="line 3: 'LaGdmnP' has the 64-bit hash of 'yixs"):
        read(path, "string")


def test_missing_vocabulary_file_is_rejected(tmp_path: Path) -> None:
    for name in ("v.npy", "v.txt", "v.csv", "v.json"):
        with pytest.raises(StoreError, match=f"table .*{name}: cannot be read: No such file"):
            read(tmp_path / name)


def test_npy_object_array_is_not_unpickled(tmp_path: Path) -> None:
    class Touches:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    np.save(tmp_path / "v.npy", np.array([Touches()], object), allow_pickle=True)
    with pytest.raises(InvalidModelError, match="not a vocabulary in npy: "):
        read(tmp_path / "v.npy")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Touches()))  # noqa: S301
    assert (tmp_path / "ran").exists()


def test_reading_lines_takes_at_most_24_bytes_per_id_and_22_mib(tmp_path: Path) -> None:
    count = 200_000
    path = write(tmp_path / "v.txt", "\n".join(map(str, range(10**15, 10**15 + count))))
    read_vocabulary(write(tmp_path / "short.txt", "1\n2"), "int64", 2, "movie")  # imports
    tracemalloc.start()
    try:
        read_vocabulary(path, "int64", count, "movie")
        assert tracemalloc.get_traced_memory()[1] < 24 * count + (22 << 20)
    finally:
        tracemalloc.stop()
