"""Tests of the templates of Open Inference Protocol requests: requests that match one are exactly
those that parsers read, with the same result."""

import sys
from random import Random
from threading import Thread
from typing import Any

import numpy as np
import pytest
from fuzz.mutate import mutated
from hypothesis import given
from hypothesis import strategies as st
from server.open_inference import LENGTH_HEADER, InferRequest, jagged
from server.strategies import bags_of_ids

from embedserve.codec.open_inference import message_template
from embedserve.codec.open_inference.bodies import BodyDecoder
from embedserve.codec.open_inference.infer_messages import MessageDecoder
from embedserve.codec.template_cache import TEMPLATES_MAX, TemplateCache
from embedserve.config import Limits
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import LookupRequest
from embedserve_proto import open_inference_pb2 as pb

LIMITS = Limits()
BODIES, MESSAGES = BodyDecoder(), MessageDecoder()
BAGS: dict[str, list[list[Any]]] = {"user": [[4], [], [6]], "tag": [[1], [2, 3] * 9, []]}


def fields_of(request: LookupRequest) -> tuple[object, ...]:
    return (
        (request.model, request.features, request.batch_size, request.output_dtype),
        (request.ids.tolist(), request.lengths.tolist(), request.output, request.weights),
    )


def parsed_message(body: bytes) -> tuple[object, ...] | None:
    """Returns the result of the library's parser; None if the request is rejected."""
    try:
        return fields_of(MESSAGES.decode_request(body, "", LIMITS))
    except EmbedServeError:
        return None


def parsed_body(body: bytes, json_bytes: int) -> tuple[object, ...] | None:
    """Returns the result of msgspec's parser: a space behind the JSON keeps it from matching a
    template."""
    body = body[:json_bytes] + b" " + body[json_bytes:]
    try:
        return fields_of(BODIES.decode_request(body, "shop", LIMITS, json_bytes + 1))
    except EmbedServeError:
        return None


def message(infer_request: InferRequest, version: str = "") -> bytes:
    return infer_request.message("shop", is_raw=True, version=version).SerializeToString()


def template_of(body: bytes) -> message_template.MessageTemplate:
    request = MESSAGES.decode_request(body, "", LIMITS)
    infer_request = pb.ModelInferRequest.FromString(body)
    model = infer_request.model_name, infer_request.model_version
    outputs = [one.name for one in infer_request.outputs]
    return message_template.MessageTemplate(model, request.model, request.features, outputs)


@given(
    bags=bags_of_ids(),
    outputs=st.sampled_from([(), ("user",), ("pooled",), ("tag", "pooled")]),
    request_id=st.text(max_size=5),
    version=st.sampled_from(["", "7"]),
    times=st.sampled_from([1, 20, 70]),
)
def test_message_matching_a_template_is_read_like_by_protobuf(
    bags: dict[str, list[list[int]]],
    outputs: tuple[str, ...],
    request_id: str,
    version: str,
    times: int,
) -> None:
    template = template_of(
        message(InferRequest(jagged({name: [[1]] for name in bags}), outputs), version)
    )
    larger = {name: [bag * times for bag in of_feature] for name, of_feature in bags.items()}
    for one in (bags, larger, {name: bags_of * times for name, bags_of in bags.items()}):
        body = message(InferRequest(jagged(one), outputs, request_id), version)
        request = template.read(body, LIMITS)
        assert request is not None
        assert fields_of(request) == parsed_message(body)


@pytest.mark.parametrize("seed", range(40))
def test_mutated_message_matches_no_template_or_reads_like_protobuf(seed: int) -> None:
    random = Random(seed)
    body = message(InferRequest(jagged(BAGS), (), "id"))
    others = [body, message(InferRequest(jagged(dict(reversed(BAGS.items())))))]
    template = template_of(body)
    for _ in range(200):
        changed = mutated(random, body, others)
        request = template.read(changed, LIMITS) if changed.startswith(template.head) else None
        assert request is None or fields_of(request) == parsed_message(changed)


@given(
    bags=bags_of_ids(),
    outputs=st.sampled_from([(), ("user",), ("tag", "pooled")]),
    times=st.sampled_from([1, 20, 70]),
)
def test_body_matching_a_template_is_read_like_by_the_parser(
    bags: dict[str, list[list[int]]], outputs: tuple[str, ...], times: int
) -> None:
    BODIES.decode_request(
        *inline_arguments(InferRequest(jagged({name: [[1]] for name in bags}), outputs)),
        is_inline=True,
    )
    for one in (bags, {name: bags_of * times for name, bags_of in bags.items()}):
        body, _, limits, json_bytes = inline_arguments(InferRequest(jagged(one), outputs))
        request = BODIES.templates.read(body, json_bytes, "shop", limits)
        assert request is not None
        assert fields_of(request) == parsed_body(body, json_bytes)


def inline_arguments(infer_request: InferRequest) -> tuple[bytes, str, Limits, int]:
    body, headers = infer_request.binary_body()
    return body, "shop", LIMITS, int(headers[LENGTH_HEADER])


@pytest.mark.parametrize("seed", range(40))
def test_mutated_body_matches_no_template_or_reads_like_the_parser(seed: int) -> None:
    random = Random(seed)
    body, model, limits, json_bytes = inline_arguments(InferRequest(jagged(BAGS)))
    BODIES.decode_request(body, model, limits, json_bytes, is_inline=True)
    assert BODIES.templates.read(body, json_bytes, model, limits) is not None
    for _ in range(200):
        head = mutated(random, body[:json_bytes], [body[:json_bytes]])
        changed = head + (body[json_bytes:] if random.random() < 0.8 else random.randbytes(60))
        request = BODIES.templates.read(changed, len(head), model, limits)
        assert request is None or fields_of(request) == parsed_body(changed, len(head))


@pytest.mark.parametrize("name", ["user [7,8]", "user: 12,", "9, 9]"])
def test_numbers_in_feature_names_are_not_read_as_sizes(name: str) -> None:
    for ids in ([[1, 2]], [[3]]):
        body, model, limits, json_bytes = inline_arguments(InferRequest(jagged({name: ids})))
        request = BODIES.decode_request(body, model, limits, json_bytes, is_inline=True)
        assert (request.features, request.ids.tolist()) == ((name,), ids[0])
        assert BODIES.templates.read(body, json_bytes, model, limits) is None


def test_template_cache_is_bounded() -> None:
    cache = message_template.MessageTemplateCache()
    first = message(InferRequest(jagged({"f": [[1]]})))
    cache.cache_template(first, template_of(first), LIMITS)
    assert cache.read(first, LIMITS) is not None
    for at in range(TEMPLATES_MAX):
        body = message(InferRequest(jagged({f"f{at}": [[1]]})))
        cache.cache_template(body, template_of(body), LIMITS)
    assert cache.read(first, LIMITS) is None
    assert cache.read(body, LIMITS) is not None
    long = message(InferRequest(jagged({"f" * message_template.TEMPLATE_BYTES_MAX: [[1]]})))
    cache.cache_template(long, template_of(long), LIMITS)
    assert cache.read(long, LIMITS) is None


def test_template_cache_counts_its_bytes_while_two_threads_add() -> None:
    """Checks the count that bounds the cache. Above the bound for good, it would fail every
    request without a cached template."""
    cache = TemplateCache[bytes]()
    templates = Random(0).choices((bytes(1), bytes(8192)), k=200_000)

    def add() -> None:
        for template in templates:
            cache.add(template, len(template))

    threads = [Thread(target=add) for _ in range(2)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert cache.nbytes == sum(map(len, cache.templates))


def test_template_does_not_match_requests_over_a_limit() -> None:
    body = message(InferRequest(jagged(BAGS)))
    template = template_of(body)
    binary, model, _, json_bytes = inline_arguments(InferRequest(jagged(BAGS)))
    BODIES.decode_request(binary, model, LIMITS, json_bytes, is_inline=True)
    for limits in (
        Limits(request_examples_max=2),
        Limits(request_ids_max=20),
        Limits(request_features_max=1),
        Limits(request_text_bytes_max=20),
    ):
        assert template.read(body, LIMITS) is not None
        assert template.read(body, limits) is None
        assert BODIES.templates.read(binary, json_bytes, model, limits) is None


def test_large_message_is_read_by_its_template() -> None:
    bags = {"user": [list(range(5000))] * 3, "tag": [[2], [], [3]]}
    body = message(InferRequest(jagged(bags)))
    request = template_of(message(InferRequest(jagged(BAGS)))).read(body, LIMITS)
    assert request is not None
    assert np.array_equal(request.ids[:15000], np.tile(np.arange(5000), 3))
    assert fields_of(request) == parsed_message(body)
