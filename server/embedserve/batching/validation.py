"""What is wrong with a request, said with field and value.

Kinds of ids and lengths are checked as a request is admitted. The rest is told apart here only
once join() has refused a batch: slow and thorough, one request at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.lookup import LookupRequest, OutputOptions
from embedserve.model_info import ModelInfo

QUOTED_CHARACTERS_MAX = 60


def check_lengths(lengths: np.ndarray, ids: int) -> None:
    """Raises InvalidRequestError unless ``lengths`` are a partition of so many ``ids``."""
    if lengths.size and lengths.min() < 0:
        position = int((lengths < 0).argmax())
        raise InvalidRequestError(
            f"lengths[{position}] is {lengths[position]}: a bag cannot hold fewer than 0 ids",
            f"lengths[{position}]",
        )
    total = int(lengths.sum(dtype=np.int64))
    if total != ids:
        raise InvalidRequestError(f"lengths add up to {total}, but there are {ids} ids", "lengths")


def check_feature_count(field: str, count: int, limits: Limits) -> None:
    """Raises RequestTooLargeError for more features than a request may name."""
    if count > limits.request_features_max:
        raise RequestTooLargeError(
            f"{field} names {count} features, {limits.said('request_features_max')}", field
        )


def name_features(request: LookupRequest, model: ModelInfo) -> None:
    """Gives the features of ``request``, which have no names, those of ``model`` in its order.

    Raises:
        InvalidRequestError: there are more or fewer.
    """
    count = request.lengths.size // request.batch_size
    if count != len(model.features):
        raise InvalidRequestError(
            f"num_features is {count}: model {model.name!r} has {len(model.features)} features, "
            f"which are taken in its order: {', '.join(model.features)}",
            "num_features",
        )
    request.features = model.features


def check_output(output: OutputOptions, model: ModelInfo) -> OutputOptions:
    """``output`` with the model's own names: a request that waits keeps none of its caller's.

    Raises:
        InvalidRequestError: a key that ``model`` has not, or that is named twice.
    """
    if not output.keys:
        return output
    field, positions = output.field, model.key_positions
    named = []
    for at, key in enumerate(output.keys):
        position = positions.get(key)
        if position is None:
            raise InvalidRequestError(
                f"{field}[{at}] is {key!r}: model {model.name!r} has no such key; "
                f"it has {', '.join(model.keys)}",
                f"{field}[{at}]",
            )
        named.append(model.keys[position])
    if len(set(output.keys)) < len(output.keys):
        twice = next(key for key, count in Counter(output.keys).items() if count > 1)
        raise InvalidRequestError(f"{field} names {twice!r} twice", field)
    return replace(output, keys=tuple(named))


def coerce_id_types(request: LookupRequest, model: ModelInfo) -> LookupRequest:
    """``request`` with integers where it has them as strings and ``model`` takes integers; as it
    is where it has none.

    Raises:
        InvalidRequestError: a string that is no integer there, an integer where ids are strings,
            or weights where nothing is pooled.
    """
    if request.weights is not None and not model.is_pooled:
        raise InvalidRequestError(
            f"weights: model {model.name!r} answers one row for each id and pools nothing: "
            "send none",
            "weights",
        )
    if request.string_features or model.string_features:
        return _in_id_types(request, model)
    return request


def _in_id_types(request: LookupRequest, model: ModelInfo) -> LookupRequest:
    check_lengths(request.lengths, request.ids.size)
    bags = request.lengths.reshape(len(request.features), request.batch_size)
    integers: dict[str, tuple[int, np.ndarray]] = {}
    start = 0
    for feature, lengths in zip(request.features, bags, strict=True):
        end = start + int(lengths.sum(dtype=np.int64))
        are_strings = feature in request.string_features
        is_other = are_strings != (feature in model.string_features)
        # Empty bags are of either type; a feature that there is not is refused as such.
        if is_other and start < end and feature in model.features:
            found = _integers(request, feature) if are_strings else 0
            if isinstance(found, int):
                raise _of_wrong_type(request, feature, lengths, start, found)
            integers[feature] = start, found
        start = end
    return _with_integers(request, integers) if integers else request


def _integers(request: LookupRequest, feature: str) -> np.ndarray | int:
    return 0 if request.strings is None else request.strings.integers[feature]


def _of_wrong_type(
    request: LookupRequest, feature: str, lengths: np.ndarray, start: int, position: int
) -> InvalidRequestError:
    """Of the id at ``position`` of a feature, whose first is at ``start`` of all."""
    example, place = place_in(lengths, position)
    field = f"features.{feature}[{example}][{place}]"
    are_strings = feature in request.string_features
    expected = "integers of 64 bits" if are_strings else "strings"
    return InvalidRequestError(
        f"{field} is {_shown(request, start + position, are_strings)}: ids of {feature!r} are "
        f"{expected}",
        field,
    )


def _with_integers(
    request: LookupRequest, integers: dict[str, tuple[int, np.ndarray]]
) -> LookupRequest:
    """``request``, which others may hold, with these in the place of their strings' hashes."""
    ids = request.ids.copy()
    for start, values in integers.values():
        ids[start : start + values.size] = values
    left = request.string_features.difference(integers)
    strings = request.strings if left else None
    return replace(request, ids=ids, string_features=left, strings=strings)


def _shown(request: LookupRequest, position: int, is_string: bool) -> str:
    """The id at ``position`` as the caller wrote it, shortened."""
    value = int(request.ids[position])
    if not is_string or request.strings is None:
        return str(value)
    text = repr(request.strings[value][: QUOTED_CHARACTERS_MAX + 1])
    return text if len(text) <= QUOTED_CHARACTERS_MAX else text[:QUOTED_CHARACTERS_MAX] + "…"


def find_invalid(
    requests: Sequence[LookupRequest], model: ModelInfo
) -> dict[int, InvalidRequestError]:
    """Which of ``requests`` (by position) may not be looked up, and why."""
    errors: dict[int, InvalidRequestError] = {}
    for i, request in enumerate(requests):
        try:
            check_lengths(request.lengths, request.ids.size)
            check_ids(request, model)
            check_weights(request)
        except InvalidRequestError as error:
            errors[i] = error
    return errors


def check_ids(request: LookupRequest, model: ModelInfo) -> None:
    """Raises InvalidRequestError for an id that has no row and may not be unknown."""
    ids_per_feature = request.lengths.reshape(len(model.features), -1).sum(axis=1)
    unknown = model.translator.translate(request.ids, ids_per_feature).unknown
    if unknown is None:
        return
    wrong = unknown & np.repeat(model.rejects_unknown, ids_per_feature)
    if not wrong.any():
        return
    position = int(wrong.argmax())
    feature, example, place = _place(request, position)
    name = model.features[feature]
    field = f"features.{name}[{example}][{place}]"
    shown = _shown(request, position, name in request.string_features)
    others = int(wrong.sum()) - 1
    raise InvalidRequestError(
        f"{field} is {shown}: {_ids_said(model, feature)}"
        + (f" ({others} more are wrong)" if others else ""),
        field,
    )


def _ids_said(model: ModelInfo, feature: int) -> str:
    """What an id should have been."""
    name = model.features[feature]
    rule = model.manifest.rule_per_feature[feature]
    if rule.rule == "map":
        return f"not one of the {rule.entries:,} ids of {name!r}"
    last_row = model.manifest.rows_per_feature[feature] - 1
    return f"ids of {name!r} are row numbers from 0 to {last_row}"


def check_weights(request: LookupRequest) -> None:
    """Raises InvalidRequestError for a weight that is infinite or not a number."""
    if request.weights is None:
        return
    wrong = ~np.isfinite(request.weights)
    if not wrong.any():
        return
    position = int(wrong.argmax())
    feature, example, place = _place(request, position)
    field = f"weights.{request.features[feature]}[{example}][{place}]"
    raise InvalidRequestError(
        f"{field} is {request.weights[position]}: weights are finite numbers", field
    )


def _place(request: LookupRequest, position: int) -> tuple[int, int, int]:
    """(feature, example, place in the bag) of the id at ``position``."""
    bag, place = place_in(request.lengths, position)
    return bag // request.batch_size, bag % request.batch_size, place


def place_in(lengths: np.ndarray, position: int) -> tuple[int, int]:
    """(bag, place in it) of the id at ``position``."""
    ends = np.cumsum(lengths, dtype=np.int64)
    bag = int(np.searchsorted(ends, position, side="right"))
    return bag, position - int(ends[bag]) + int(lengths[bag])
