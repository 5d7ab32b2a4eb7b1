"""Tests of the templates of Open Inference Protocol requests: requests that match one are exactly
those that parsers read, with the same result."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from fuzz.mutate import mutated
from hypothesis import given
from hypothesis import strategies as st
from server.open_inference import LENGTH_HEADER, Asked, jagged
from server.strategies import bags_of_ids

from embedserve.codec.open_inference import message_template
from embedserve.codec.open_inference.bodies import BodyDecoder
from embedserve.codec.open_inference.infer_messages import MessageDecoder
from embedserve.codec.template_cache import TEMPLATES_MAX
from embedserve.config import Limits
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import LookupRequest
from embedserve_proto import open_inference_pb2 as pb

LIMITS = Limits()
BODIES, MESSAGES = BodyDecoder(), MessageDecoder()
BAGS: dict[str, list[list[Any]]] = {"user": [[4], [], [6]], "tag": [[1], [2, 3] * 9, []]}


def told(request: LookupRequest) -> tuple[object, ...]:
    return (
        (request.model, request.features, request.batch_size, request.output_dtype),
        (request.ids.tolist(), request.lengths.tolist(), request.output, request.weights),
    )


def parsed_message(body: bytes) -> tuple[object, ...] | None:
    """Returns the result of the library's parser; None if the request is rejected."""
    try:
        return told(MESSAGES.decode_request(body, "", LIMITS))
    except EmbedServeError:
        return None


def parsed_body(body: bytes, json_bytes: int) -> tuple[object, ...] | None:
    """Returns the result of msgspec's parser: a space behind the JSON keeps it from matching a
    template."""
    body = body[:json_bytes] + b" " + body[json_bytes:]
    try:
        return told(BODIES.decode_request(body, "shop", LIMITS, json_bytes + 1))
    except EmbedServeError:
        return None


def message(asked: Asked, version: str = "") -> bytes:
    return asked.message("shop", is_raw=True, version=version).SerializeToString()


def form_of(body: bytes) -> message_template.MessageTemplate:
    request = MESSAGES.decode_request(body, "", LIMITS)
    asked = pb.ModelInferRequest.FromString(body)
    model = asked.model_name, asked.model_version
    outputs = [one.name for one in asked.outputs]
    return message_template.MessageTemplate(model, request.model, request.features, outputs)


@given(
    bags=bags_of_ids(),
    outputs=st.sampled_from([(), ("user",), ("pooled",), ("tag", "pooled")]),
    request_id=st.text(max_size=5),
    version=st.sampled_from(["", "7"]),
    times=st.sampled_from([1, 20, 70]),
)
def test_a_known_message_is_read_as_by_the_library(
    bags: dict[str, list[list[int]]],
    outputs: tuple[str, ...],
    request_id: str,
    version: str,
    times: int,
) -> None:
    form = form_of(message(Asked(jagged({name: [[1]] for name in bags}), outputs), version))
    larger = {name: [bag * times for bag in of_feature] for name, of_feature in bags.items()}
    for one in (bags, larger, {name: bags_of * times for name, bags_of in bags.items()}):
        body = message(Asked(jagged(one), outputs, request_id), version)
        request = form.read(body, LIMITS)
        assert request is not None
        assert told(request) == parsed_message(body)


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_message_is_read_as_by_the_library_or_not_by_its_form(seed: int) -> None:
    random = Random(seed)
    body = message(Asked(jagged(BAGS), (), "id"))
    others = [body, message(Asked(jagged(dict(reversed(BAGS.items())))))]
    form = form_of(body)
    for _ in range(200):
        changed = mutated(random, body, others)
        request = form.read(changed, LIMITS) if changed.startswith(form.head) else None
        assert request is None or told(request) == parsed_message(changed)


@given(
    bags=bags_of_ids(),
    outputs=st.sampled_from([(), ("user",), ("tag", "pooled")]),
    times=st.sampled_from([1, 20, 70]),
)
def test_a_known_body_is_read_as_by_the_parser(
    bags: dict[str, list[list[int]]], outputs: tuple[str, ...], times: int
) -> None:
    BODIES.try_decode_inline(*whole(Asked(jagged({name: [[1]] for name in bags}), outputs)))
    for one in (bags, {name: bags_of * times for name, bags_of in bags.items()}):
        body, _, limits, json_bytes = whole(Asked(jagged(one), outputs))
        request = BODIES.templates.read(body, json_bytes, "shop", limits)
        assert request is not None
        assert told(request) == parsed_body(body, json_bytes)


def whole(asked: Asked) -> tuple[bytes, str, Limits, int]:
    body, headers = asked.binary_body()
    return body, "shop", LIMITS, int(headers[LENGTH_HEADER])


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_body_is_read_as_by_the_parser_or_not_by_its_form(seed: int) -> None:
    random = Random(seed)
    body, model, limits, json_bytes = whole(Asked(jagged(BAGS)))
    BODIES.try_decode_inline(body, model, limits, json_bytes)
    assert BODIES.templates.read(body, json_bytes, model, limits) is not None
    for _ in range(200):
        head = mutated(random, body[:json_bytes], [body[:json_bytes]])
        changed = head + (body[json_bytes:] if random.random() < 0.8 else random.randbytes(60))
        request = BODIES.templates.read(changed, len(head), model, limits)
        assert request is None or told(request) == parsed_body(changed, len(head))


@pytest.mark.parametrize("name", ["user [7,8]", "user: 12,", "9, 9]"])
def test_numbers_in_names_are_no_sizes(name: str) -> None:
    for ids in ([[1, 2]], [[3]]):
        body, model, limits, json_bytes = whole(Asked(jagged({name: ids})))
        request = BODIES.try_decode_inline(body, model, limits, json_bytes)
        assert request is not None
        assert (request.features, request.ids.tolist()) == ((name,), ids[0])
        assert BODIES.templates.read(body, json_bytes, model, limits) is None


def test_what_is_remembered_is_bounded() -> None:
    known = message_template.MessageTemplateCache()
    first = message(Asked(jagged({"f": [[1]]})))
    known.remember(first, form_of(first), LIMITS)
    assert known.read(first, LIMITS) is not None
    for at in range(TEMPLATES_MAX):
        body = message(Asked(jagged({f"f{at}": [[1]]})))
        known.remember(body, form_of(body), LIMITS)
    assert known.read(first, LIMITS) is None
    assert known.read(body, LIMITS) is not None
    long = message(Asked(jagged({"f" * message_template.TEMPLATE_BYTES_MAX: [[1]]})))
    known.remember(long, form_of(long), LIMITS)
    assert known.read(long, LIMITS) is None


def test_a_known_form_keeps_to_the_limits() -> None:
    body = message(Asked(jagged(BAGS)))
    form = form_of(body)
    binary, model, _, json_bytes = whole(Asked(jagged(BAGS)))
    BODIES.try_decode_inline(binary, model, LIMITS, json_bytes)
    for limits in (
        Limits(request_examples_max=2),
        Limits(request_ids_max=20),
        Limits(request_features_max=1),
        Limits(request_text_bytes_max=20),
    ):
        assert form.read(body, LIMITS) is not None
        assert form.read(body, limits) is None
        assert BODIES.templates.read(binary, json_bytes, model, limits) is None


def test_large_messages_of_a_known_form() -> None:
    bags = {"user": [list(range(5000))] * 3, "tag": [[2], [], [3]]}
    body = message(Asked(jagged(bags)))
    request = form_of(message(Asked(jagged(BAGS)))).read(body, LIMITS)
    assert request is not None
    assert np.array_equal(request.ids[:15000], np.tile(np.arange(5000), 3))
    assert told(request) == parsed_message(body)
