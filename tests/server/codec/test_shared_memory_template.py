"""Tests of the templates of shared-memory requests: they yield what the parsers do, and a template
cached for one caller reveals nothing to another."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from server.open_inference import InferRequest, Input, Place, jagged

from embedserve.codec.open_inference.bodies import BodyDecoder
from embedserve.codec.open_inference.infer_messages import MessageDecoder
from embedserve.codec.open_inference.outputs import ResponseOptions
from embedserve.codec.open_inference.shared_memory_template import TEMPLATE_BYTES_MAX
from embedserve.codec.open_inference.tensors import INLINE_TENSOR_BYTES_MAX
from embedserve.codec.template_cache import TEMPLATES_MAX
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError, UnknownRegionError
from embedserve.lookup_types import LookupRequest, WouldBlockError
from embedserve.shared_memory.region import Region, open_region
from embedserve_proto import open_inference_pb2 as pb

LIMITS = Limits()
BAGS: dict[str, list[list[Any]]] = {"user": [[4], [], [6]], "tag": [[1], [2, 3] * 9, []]}
OTHER_BAGS: dict[str, list[list[Any]]] = {"user": [[], [5, 9], []], "tag": [[8] * 19, [], []]}
"""Other bags with as many ids, so that the same bytes describe both requests."""
FILE_BYTES = 2 << 20
OUTPUT = "pooled"
OUTPUT_PLACE = Place("vectors", 64, 4096)
Regions = Mapping[str, Region]


class Caller:
    """A caller with a region `ids` and a region `vectors`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        for name in ("ids", "vectors"):
            (folder / name).write_bytes(bytes(FILE_BYTES))
        self.regions = {name: self.opened(name, FILE_BYTES) for name in ("ids", "vectors")}

    def opened(self, name: str, nbytes: int) -> Region:
        return open_region(name, name, 0, nbytes, folder=str(self._folder))

    def put(self, inputs: list[Input], gap: int = 0) -> list[Place]:
        """Writes the inputs; returns the location of each."""
        places, data = [], b""
        for one in inputs:
            data += bytes(gap)
            places.append(Place("ids", len(data), len(one.raw)))
            data += one.raw
        with (self._folder / "ids").open("r+b") as file:
            file.write(data)
        return places

    def cut(self) -> None:
        (self._folder / "ids").write_bytes(b"")


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Callable[[str], Caller]]:
    callers: list[Caller] = []

    def make(name: str) -> Caller:
        callers.append(Caller(tmp_path / name))
        return callers[-1]

    yield make
    for one in callers:
        for region in one.regions.values():
            region.close()


def infer_request(inputs: list[Input], places: list[Place], request_id: str = "") -> InferRequest:
    """Returns a request with ``inputs`` at ``places``, and its output in shared memory, too."""
    parameters = {"output_dtype": "FP16"}
    outs = {OUTPUT: OUTPUT_PLACE}
    return InferRequest(inputs, (OUTPUT,), request_id, parameters, dict(enumerate(places)), outs)


def body(*described: Any) -> bytes:
    return infer_request(*described).json_body()


def message(*described: Any) -> bytes:
    request = infer_request(*described).message("shop", is_raw=True)
    return request.SerializeToString(deterministic=True)


DECODERS: dict[str, tuple[Any, type[BodyDecoder | MessageDecoder]]] = {
    "REST": (body, BodyDecoder),
    "gRPC": (message, MessageDecoder),
}


@pytest.fixture(params=DECODERS)
def request_format(request: pytest.FixtureRequest) -> Any:
    """Returns (function that makes bodies, decoder for them)."""
    make, decoder = DECODERS[request.param]
    return make, decoder()


def with_min_seq(encoded: bytes, min_seq: int) -> bytes:
    """Adds a min_seq to a body or message."""
    if encoded.startswith(b"{"):
        parsed = json.loads(encoded)
        parsed["parameters"]["min_seq"] = min_seq
        return json.dumps(parsed).encode()
    request = pb.ModelInferRequest.FromString(encoded)
    request.parameters["min_seq"].int64_param = min_seq
    return request.SerializeToString(deterministic=True)


def decode(
    decoder: BodyDecoder | MessageDecoder,
    body: bytes,
    regions: Regions | None,
    limits: Limits = LIMITS,
    *,
    is_inline: bool = True,
) -> LookupRequest:
    return decoder.decode_request(body, "shop", limits, regions=regions, is_inline=is_inline)


def contents(request: LookupRequest) -> tuple[object, ...]:
    assert request.output is not None
    options = request.output.format_options
    assert isinstance(options, ResponseOptions)
    locations = options.locations
    assert locations is not None
    assert request.weights is None
    return (
        (request.model, request.features, request.batch_size, request.output_dtype),
        (request.ids.tolist(), request.lengths.tolist(), request.output.has_all),
        {name: (id(one.region), one.offset, one.nbytes) for name, one in locations.items()},
    )


def expected(bags: Mapping[str, list[list[Any]]], caller: Caller) -> tuple[object, ...]:
    ids = [one for of_feature in bags.values() for bag in of_feature for one in bag]
    lengths = [len(bag) for of_feature in bags.values() for bag in of_feature]
    return (
        ("shop", tuple(bags), 3, "float16"),
        (ids, lengths, True),
        {OUTPUT: (id(caller.regions["vectors"]), OUTPUT_PLACE.offset, OUTPUT_PLACE.nbytes)},
    )


def is_cached(decoder: Any, request_body: bytes) -> bool:
    templates = decoder.shared_memory_templates.templates
    return any(one.has_body(request_body, LIMITS) for one in templates)


@pytest.mark.parametrize("gap", [0, 24])
def test_template_reads_the_current_region_contents(
    caller: Callable[[str], Caller], request_format: Any, gap: int
) -> None:
    make, decoder = request_format
    one = caller("one")
    request_body = make(jagged(BAGS), one.put(jagged(BAGS), gap))
    assert not is_cached(decoder, request_body)
    for bags in (BAGS, OTHER_BAGS, BAGS):
        one.put(jagged(bags), gap)
        for is_inline in (True, False):
            request = decode(decoder, request_body, one.regions, is_inline=is_inline)
            assert contents(request) == expected(bags, one)
        assert is_cached(decoder, request_body)


def test_cached_template_uses_the_regions_of_each_caller(
    caller: Callable[[str], Caller], request_format: Any
) -> None:
    make, decoder = request_format
    one, another = caller("one"), caller("another")
    request_body = make(jagged(BAGS), one.put(jagged(BAGS)))
    another.put(jagged(OTHER_BAGS))
    for _ in range(2):
        request = decode(decoder, request_body, one.regions)
        assert contents(request) == expected(BAGS, one)
        request = decode(decoder, request_body, another.regions)
        assert contents(request) == expected(OTHER_BAGS, another)
    for regions, reason in (
        ({}, "which is not registered"),
        ({"ids": one.regions["ids"]}, "^output 'pooled' .* 'vectors', which is not registered"),
        ({"vectors": one.regions["vectors"]}, r"^input 'user\.ids' .* 'ids', which is not"),
    ):
        with pytest.raises(UnknownRegionError, match=reason):
            decode(decoder, request_body, regions)
    with pytest.raises(InvalidRequestError, match="which this server does not use"):
        decode(decoder, request_body, None)


@pytest.mark.parametrize(("name", "nbytes"), [("ids", 100), ("vectors", 4000)])
def test_region_that_was_shortened_is_rejected(
    caller: Callable[[str], Caller], request_format: Any, name: str, nbytes: int
) -> None:
    make, decoder = request_format
    one = caller("one")
    request_body = make(jagged(BAGS), one.put(jagged(BAGS)))
    decode(decoder, request_body, one.regions)
    shorter = one.regions | {name: one.opened(name, nbytes)}
    with pytest.raises(InvalidRequestError, match=f"region '{name}', which has {nbytes}$"):
        decode(decoder, request_body, shorter)
    shorter[name].close()


def test_invalid_current_region_contents_are_rejected(
    caller: Callable[[str], Caller], request_format: Any
) -> None:
    make, decoder = request_format
    one = caller("one")
    request_body = make(jagged(BAGS), one.put(jagged(BAGS)))
    decode(decoder, request_body, one.regions)
    one.put(jagged(BAGS | {"user": [[4], [], []]}))
    with pytest.raises(InvalidRequestError, match=r"'user\.lengths' .* adds up to"):
        decode(decoder, request_body, one.regions)
    one.cut()
    with pytest.raises(InvalidRequestError, match="'ids': its file was cut to 0 bytes"):
        decode(decoder, request_body, one.regions)
    one.regions["ids"].close()
    with pytest.raises(InvalidRequestError, match="'ids': it is not registered any more"):
        decode(decoder, request_body, one.regions)


def test_large_inputs_are_not_decoded_inline(
    caller: Callable[[str], Caller], request_format: Any
) -> None:
    make, decoder = request_format
    one = caller("one")
    bags = {"user": [list(range(INLINE_TENSOR_BYTES_MAX // 8)), [1], []]}
    request_body = make(jagged(bags), one.put(jagged(bags)))
    for _ in range(2):
        with pytest.raises(WouldBlockError):
            decode(decoder, request_body, one.regions)
        request = decoder.decode_request(request_body, "shop", LIMITS, regions=one.regions)
        assert contents(request) == expected(bags, one)
    assert is_cached(decoder, request_body)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(request_examples_max=2),
        Limits(request_ids_max=20),
        Limits(request_features_max=1),
        Limits(body_bytes_max=100),
    ],
)
def test_cached_request_over_a_limit_is_rejected(
    caller: Callable[[str], Caller], request_format: Any, limits: Limits
) -> None:
    make, decoder = request_format
    one = caller("one")
    request_body = make(jagged(BAGS), one.put(jagged(BAGS)))
    decode(decoder, request_body, one.regions)
    with pytest.raises(RequestTooLargeError):
        decode(decoder, request_body, one.regions, limits)


def test_weights_strings_request_ids_and_empty_ids_are_not_cached(
    caller: Callable[[str], Caller], request_format: Any
) -> None:
    make, decoder = request_format
    one = caller("one")
    weighted = [*jagged(BAGS), Input("tag.weights", "FP32", [0.5] * 19)]
    without_ids = jagged({"user": [[]]})
    strings = jagged({"user": [["a"]]})
    for inputs, request_id in (
        (weighted, ""),
        (without_ids, ""),
        (strings, ""),
        (jagged(BAGS), "7"),
    ):
        request_body = make(inputs, one.put(inputs), request_id)
        assert decode(decoder, request_body, one.regions).features
        assert not is_cached(decoder, request_body)


def test_template_cache_is_bounded(caller: Callable[[str], Caller], request_format: Any) -> None:
    make, decoder = request_format
    one = caller("one")

    def decode_feature(name: str) -> bytes:
        inputs = jagged({name: [[1]]})
        request_body: bytes = make(inputs, one.put(inputs))
        decoder.decode_request(request_body, "shop", LIMITS, regions=one.regions)
        return request_body

    first = decode_feature("first")
    every = [decode_feature(f"f{at}") for at in range(TEMPLATES_MAX)]
    assert not is_cached(decoder, first)
    assert all(is_cached(decoder, one) for one in every)
    assert not is_cached(decoder, decode_feature("f" * TEMPLATE_BYTES_MAX))


def test_requests_with_min_seq_are_read_and_not_cached(
    request_format: Any, caller: Callable[[str], Caller]
) -> None:
    make, decoder = request_format
    one = caller("one")
    inputs = jagged(BAGS)
    plain = make(inputs, one.put(inputs))
    decode(decoder, plain, one.regions)
    before = [*decoder.shared_memory_templates.templates]
    assert before
    for seq in (7, 7, 8):
        encoded = with_min_seq(plain, seq)
        for is_inline in (True, False):
            request = decode(decoder, encoded, one.regions, is_inline=is_inline)
            assert request.min_seq == seq
            assert contents(request) == expected(BAGS, one)
    assert decoder.shared_memory_templates.templates == before
    again = decode(decoder, plain, one.regions)
    assert again.min_seq is None
