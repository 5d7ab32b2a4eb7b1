"""Explains why the fast path rejected a JSON request: names the field and the value.

Slow and thorough. It runs on invalid input only and never decides whether a request is valid.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from embedserve.codec.string_ids import integers_of
from embedserve.errors import InvalidRequestError, shortened
from embedserve.request_checks import SEQ_MAX

_Check = Callable[[list[Any]], bool]
"""Returns whether all values of a list are right, without a call for each value."""
CHUNK = 1024
"""Bags or values that are checked together. The elements of a chunk are checked individually only
where an element is wrong."""
QUOTED_CHARACTERS_MAX = 60
INT64_MAX = 2**63 - 1
FIELDS = ("features", "weights", "output_dtype", "version", "output_keys", "min_seq")
OUTPUT_DTYPES = ("float32", "float16")


def explain_invalid_json(body: bytes) -> InvalidRequestError | None:
    """Returns the first error found in ``body``, or None if nothing is found."""
    if not body.strip():
        return _wrong("body", 'is empty: send JSON such as {"features": {"NAME": [[1, 2]]}}')
    try:
        # Python's json also parses NaN, so that a NaN is reported at its position.
        parsed = json.loads(body.decode())
    except RecursionError:
        return _wrong("body", "is nested too deeply")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return _wrong("body", f"is not JSON: {error}")
    except ValueError:  # an integer that is too long for Python to parse
        return _wrong("body", f"has an integer of more than {sys.get_int_max_str_digits()} digits")
    if not isinstance(parsed, dict):
        return _wrong("body", f"is {_quote(parsed)}, expected an object with the field 'features'")
    for name in parsed:
        if name not in FIELDS:
            return _wrong(
                shortened(name) or '""',
                f"is not a field of a request; there are {', '.join(FIELDS)}",
            )
    return (
        _features(parsed)
        or _weights(parsed)
        or _version_and_dtype(parsed)
        or _output_keys(parsed)
        or _min_seq(parsed)
    )


def _features(parsed: dict[str, Any]) -> InvalidRequestError | None:
    features = parsed.get("features")
    if not isinstance(features, dict):
        what = f"is {_quote(features)}" if "features" in parsed else "is missing"
        return _wrong("features", f"{what}: expected an object from feature to lists of ids")
    if not features:
        return _wrong("features", "is {}: name at least one feature")
    for name, bags in features.items():
        if error := _jagged(f"features.{shortened(name)}", bags, "ids", _check_of(bags)):
            return error
    return _batch_sizes(features)


def _check_of(bags: Any) -> _Check:
    """Returns the check for a feature's ids, which are either all strings, or integers, for which
    strings may stand.

    In a mixture the minority is reported as wrong; in a tie, the strings are. The number of strings
    that are not integers is estimated from the first CHUNK strings.
    """
    if not isinstance(bags, list):
        return _are_ids
    ids = [*chain.from_iterable(bags)] if set(map(type, bags)) == {list} else bags
    strings = [one for one in ids if isinstance(one, str)]
    if len(strings) == len(ids):
        return _are_strings
    sample = strings[:CHUNK]
    words = sum(isinstance(integers_of([one]), int) for one in sample)
    are_words = words * len(strings) > len(sample) * (len(ids) - len(strings))
    return _are_strings if are_words else _are_ids


def _batch_sizes(features: dict[str, list[Any]]) -> InvalidRequestError | None:
    """Checks that all features have the same number of bags. A flat list is one bag."""
    if not any(features.values()):
        field = f"features.{shortened(next(iter(features)))}"
        return _wrong(field, "is []: an empty batch; one example without ids is [[]]")
    first_name, first = next(iter(features.items()))
    batch_size = _bags(first)
    for name, bags in features.items():
        if _bags(bags) != batch_size:
            return _wrong(
                f"features.{shortened(name)}",
                f"has {_examples(bags)}, but features.{shortened(first_name)} has "
                f"{_examples(first)}",
            )
    return None


def _bags(bags: list[Any]) -> int:
    return len(bags) if bags and isinstance(bags[0], list) else 1


def _examples(bags: list[Any]) -> str:
    count = _bags(bags)
    return f"{count} example{'s' if count != 1 else ''}"


def _weights(parsed: dict[str, Any]) -> InvalidRequestError | None:
    weights = parsed.get("weights")
    if weights is None:
        return None
    if not isinstance(weights, dict):
        return _wrong("weights", f"is {_quote(weights)}: expected an object like features")
    for name, bags in weights.items():
        field = f"weights.{shortened(name)}"
        if name not in parsed["features"]:
            return _wrong(field, f"has no features.{shortened(name)} beside it")
        if error := _jagged(field, bags, "weights", _are_weights):
            return error
        if error := _same_shape(shortened(name), parsed["features"][name], bags):
            return error
    return None


def _same_shape(name: str, ids: list[Any], weights: list[Any]) -> InvalidRequestError | None:
    id_bags, weight_bags = _as_bags(ids), _as_bags(weights)
    if len(id_bags) != len(weight_bags):
        return _wrong(
            f"weights.{name}", f"has {_examples(weights)}, features.{name} has {_examples(ids)}"
        )
    if list(map(len, id_bags)) == list(map(len, weight_bags)):
        return None
    for i, (bag, weight_bag) in enumerate(zip(id_bags, weight_bags, strict=True)):
        if len(bag) != len(weight_bag):
            return _wrong(f"weights.{name}[{i}]", weights_mismatch(len(weight_bag), len(bag)))
    return None


def _as_bags(bags: list[Any]) -> list[list[Any]]:
    return bags if bags and isinstance(bags[0], list) else [bags]


def _version_and_dtype(parsed: dict[str, Any]) -> InvalidRequestError | None:
    version = parsed.get("version")
    if isinstance(version, bool) or not isinstance(version, int | str | None):
        return _wrong("version", f"is {_quote(version)}, expected a number or an alias")
    if isinstance(version, int) and not 0 <= version <= INT64_MAX:
        return _wrong("version", f"is {_quote(version)}, expected a number from 0 to {INT64_MAX}")
    output_dtype = parsed.get("output_dtype")
    if output_dtype is None or output_dtype in OUTPUT_DTYPES:
        return None
    expected = " or ".join(f'"{name}"' for name in OUTPUT_DTYPES)
    return _wrong("output_dtype", f"is {_quote(output_dtype)}, expected {expected}")


def _output_keys(parsed: dict[str, Any]) -> InvalidRequestError | None:
    output_keys = parsed.get("output_keys")
    if output_keys is None:
        return None
    if not isinstance(output_keys, list):
        return _wrong("output_keys", f"is {_quote(output_keys)}: expected a list of keys")
    for i, key in enumerate(output_keys):
        if not _are_strings([key]):
            problem = _problem(key, _are_strings) if isinstance(key, str) else "expected a key"
            return _wrong(f"output_keys[{i}]", f"is {_quote(key)}: {problem}")
    return None


def _min_seq(parsed: dict[str, Any]) -> InvalidRequestError | None:
    min_seq = parsed.get("min_seq")
    if min_seq is None or (type(min_seq) is int and 0 <= min_seq <= SEQ_MAX):
        return None
    return _wrong("min_seq", f"is {_quote(min_seq)}, expected an integer from 0 to {SEQ_MAX}")


def _jagged(field: str, bags: Any, what: str, are_right: _Check) -> InvalidRequestError | None:
    """Checks a list of lists, or one flat list."""
    if not isinstance(bags, list):
        return _wrong(field, f"is {_quote(bags)}: expected a list of lists of {what}")
    if not bags or not isinstance(bags[0], list):
        return _bag(field, bags, are_right)

    def are_bags(some: list[Any]) -> bool:
        return set(map(type, some)) == {list} and are_right([*chain(*some)])

    i = _first_wrong(bags, are_bags)
    if i is None:
        return None
    if not isinstance(bags[i], list):
        return _wrong(f"{field}[{i}]", f"is {_quote(bags[i])}: expected a list of {what}")
    return _bag(f"{field}[{i}]", bags[i], are_right)


def _bag(field: str, bag: list[Any], are_right: _Check) -> InvalidRequestError | None:
    i = _first_wrong(bag, are_right)
    if i is None:
        return None
    return _wrong(f"{field}[{i}]", f"is {_quote(bag[i])}: {_problem(bag[i], are_right)}")


def _first_wrong(values: list[Any], are_right: _Check) -> int | None:
    """Returns the position of the first wrong value, or None."""
    for start in range(0, len(values), CHUNK):
        if not are_right(values[start : start + CHUNK]):
            each = range(start, start + CHUNK)
            return next((i for i in each if not are_right(values[i : i + 1])), None)
    return None


def _are_ids(values: list[Any]) -> bool:
    types = set(map(type, values))
    if str in types:
        return types <= {int, str} and not isinstance(integers_of([*map(str, values)]), int)
    try:
        return types <= {int} and len(array("q", values)) == len(values)
    except OverflowError:
        return False


def _are_strings(values: list[Any]) -> bool:
    try:
        return set(map(type, values)) <= {str} and isinstance("".join(values).encode(), bytes)
    except UnicodeEncodeError:
        return False


def _are_weights(values: list[Any]) -> bool:
    if not set(map(type, values)) <= {int, float}:
        return False
    try:
        with np.errstate(over="ignore"):
            as_float32 = np.frombuffer(array("d", values)).astype(np.float32)
    except OverflowError:
        return False
    return bool(np.isfinite(as_float32).all())


def _problem(value: Any, are_right: _Check) -> str:
    """Returns what is wrong with ``value``, which ``are_right`` rejects."""
    if are_right is _are_ids:
        if type(value) is int:
            return "ids are 64-bit integers"
        more = ", and not all of this one are strings" if isinstance(value, str) else ""
        return f"ids are integers, or strings for a whole feature{more}"
    if are_right is _are_strings:
        if isinstance(value, str):
            return "half of a surrogate pair is no text"
        return "most ids of this feature are strings"
    is_number = type(value) in (int, float)
    return "weights are finite float32 numbers" if is_number else "weights are numbers"


def weights_mismatch(weights: int, ids: int) -> str:
    """Returns what is wrong with the weights of a bag, such as "has 2 weights for 1 id"."""
    return f"has {counted(weights, 'weight')} for {counted(ids, 'id')}"


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as "1 id" and "2 ids"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _quote(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deeply"
    if len(text) > QUOTED_CHARACTERS_MAX:
        return text[:QUOTED_CHARACTERS_MAX] + "…"
    return text


def _wrong(field: str, problem: str) -> InvalidRequestError:
    # A name may hold half of a surrogate pair, which no response could be encoded with.
    return InvalidRequestError(_as_text(f"{field} {problem}"), _as_text(field))


def _as_text(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
