"""Validation of requests; errors name the field and the value.

adapt_to_model() checks the types of ids, and the lengths of a request whose features it reorders,
before the batch is joined. All other checks are done twice. join() makes them fast, on the whole
batch. Only when it has rejected a batch does find_invalid() make them again, slowly, for each
request: a check in find_invalid() alone never runs. One in join() alone fails the whole batch with
an AssertionError.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from embedserve.errors import InvalidRequestError, shortened
from embedserve.lookup_types import LookupRequest, OutputOptions
from embedserve.model_info import ModelInfo
from embedserve.request_checks import check_lengths, check_unique, find_bag
from embedserve_store.ids.translate import OverrideRows

QUOTED_CHARACTERS_MAX = 60


def name_features(request: LookupRequest, model: ModelInfo) -> None:
    """Names the unnamed features of ``request`` after those of ``model``, in its order.

    Raises:
        InvalidRequestError: the numbers of features differ.
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
    """Returns ``output`` with the model's own key strings.

    A queued request then keeps none of the strings of its client in memory.

    Raises:
        InvalidRequestError: ``model`` lacks a key, or a key is named twice.
    """
    if not output.keys:
        return output
    field, positions = output.field, model.key_positions
    named = []
    for at, key in enumerate(output.keys):
        position = positions.get(key)
        if position is None:
            raise InvalidRequestError(
                f"{field}[{at}] is {shortened(key)!r}: model {model.name!r} has no such key; "
                f"it has {', '.join(model.keys)}",
                f"{field}[{at}]",
            )
        named.append(model.keys[position])
    check_unique(field, output.keys)
    return replace(output, keys=tuple(named))


def coerce_id_types(request: LookupRequest, model: ModelInfo) -> LookupRequest:
    """Returns ``request`` with strings parsed as integers where ``model`` takes integers.

    A request without such strings is returned as it is.

    Raises:
        InvalidRequestError: a string is not an integer where integers are needed, an id is an
            integer where strings are needed, or weights are sent to an unpooled model.
    """
    if request.weights is not None and not model.is_pooled:
        raise InvalidRequestError(
            f"weights: model {model.name!r} answers one row for each id and pools nothing: "
            "send none",
            "weights",
        )
    if not (request.string_features or model.string_features):
        return request
    check_lengths(request.lengths, request.ids.size)
    bags = request.lengths.reshape(len(request.features), request.batch_size)
    integers: dict[str, tuple[int, np.ndarray]] = {}
    strings, start = request.strings, 0
    for feature, lengths in zip(request.features, bags, strict=True):
        end = start + int(lengths.sum(dtype=np.int64))
        are_strings = feature in request.string_features
        is_other = are_strings != (feature in model.string_features)
        # Empty bags match either type. A feature that the model lacks is rejected elsewhere.
        if is_other and start < end and feature in model.feature_positions:
            found = strings.integers[feature] if are_strings and strings is not None else 0
            if isinstance(found, int):
                raise _wrong_type_error(request, feature, lengths, start, found)
            integers[feature] = start, found
        start = end
    return _with_integers(request, integers) if integers else request


def _wrong_type_error(
    request: LookupRequest, feature: str, lengths: np.ndarray, start: int, position: int
) -> InvalidRequestError:
    """Returns the error for the id at ``position`` of a feature.

    ``start`` is the position of the feature's first id among all ids.
    """
    example, place = find_bag(lengths, position)
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
    """Returns a copy of ``request`` with ``integers`` in place of the hashes of their strings.

    ``request`` itself is not changed, as other code may hold it.
    """
    ids = request.ids.copy()
    for start, values in integers.values():
        ids[start : start + values.size] = values
    left = request.string_features.difference(integers)
    strings = request.strings if left else None
    return replace(request, ids=ids, string_features=left, strings=strings)


def _shown(request: LookupRequest, position: int, is_string: bool) -> str:
    """Returns the id at ``position`` as the client wrote it, shortened."""
    value = int(request.ids[position])
    if not is_string or request.strings is None:
        return str(value)
    text = repr(request.strings[value][: QUOTED_CHARACTERS_MAX + 1])
    return text if len(text) <= QUOTED_CHARACTERS_MAX else text[:QUOTED_CHARACTERS_MAX] + "…"


def find_invalid(
    requests: Sequence[LookupRequest], model: ModelInfo, override_rows: OverrideRows | None = None
) -> dict[int, InvalidRequestError]:
    """Returns the errors of the invalid ``requests`` by position.

    Args:
        override_rows: as in ``join``.
    """
    errors: dict[int, InvalidRequestError] = {}
    for i, request in enumerate(requests):
        try:
            check_lengths(request.lengths, request.ids.size)
            check_ids(request, model, override_rows)
            check_weights(request)
        except InvalidRequestError as error:
            errors[i] = error
    return errors


def check_ids(
    request: LookupRequest, model: ModelInfo, override_rows: OverrideRows | None = None
) -> None:
    """Raises InvalidRequestError for an id without a row if its table rejects unknown ids."""
    ids_per_feature = request.lengths.reshape(len(model.features), -1).sum(axis=1)
    unknown = model.translator.translate(request.ids, ids_per_feature, override_rows).unknown
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
        f"{field} is {shown}: {_accepted_ids(model, feature)}"
        + (f" ({others} more are wrong)" if others else ""),
        field,
    )


def _accepted_ids(model: ModelInfo, feature: int) -> str:
    """Returns the end of an error message: the ids that ``feature`` accepts."""
    name = model.features[feature]
    rule = model.manifest.rule_per_feature[feature]
    if rule.rule == "map" and model.deltas is not None:
        return f"not one of the ids of {name!r}, as of delta {model.deltas.live.seq}"
    if rule.rule == "map":
        return f"not one of the {rule.entries:,} ids of {name!r}"
    last_row = model.manifest.rows_per_feature[feature] - 1
    return f"ids of {name!r} are row numbers from 0 to {last_row}"


def check_weights(request: LookupRequest) -> None:
    """Raises InvalidRequestError for a weight that is infinite or NaN."""
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
    """Returns (feature, example, index in the bag) of the id at ``position``."""
    bag, place = find_bag(request.lengths, position)
    return bag // request.batch_size, bag % request.batch_size, place
