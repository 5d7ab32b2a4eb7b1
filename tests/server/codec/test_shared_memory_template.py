"""Tests of the templates of shared-memory requests: they yield what the parsers do, and a template
cached for one caller reveals nothing to another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from server.open_inference import Asked, Input, jagged

from embedserve.codec.open_inference.answers import ResponseOptions
from embedserve.codec.open_inference.bodies import BodyDecoder
from embedserve.codec.open_inference.infer_messages import MessageDecoder
from embedserve.codec.open_inference.shared_memory_template import TEMPLATE_BYTES_MAX
from embedserve.codec.open_inference.tensors import INLINE_BYTES_MAX
from embedserve.codec.template_cache import TEMPLATES_MAX
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError, UnknownRegionError
from embedserve.lookup_types import LookupRequest
from embedserve.shared_memory.region import Region, open_region
from embedserve_proto import open_inference_pb2 as pb

LIMITS = Limits()
BAGS: dict[str, list[list[Any]]] = {"user": [[4], [], [6]], "tag": [[1], [2, 3] * 9, []]}
OTHERS: dict[str, list[list[Any]]] = {"user": [[], [5, 9], []], "tag": [[8] * 19, [], []]}
"""Other bags with as many ids, so that the same bytes describe both requests."""
FILE_BYTES = 2 << 20
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

    def put(self, inputs: list[Input], gap: int = 0) -> list[tuple[int, int]]:
        """Writes the inputs; returns (offset, bytes) of each."""
        places, data = [], b""
        for one in inputs:
            data += bytes(gap)
            places.append((len(data), len(one.raw)))
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


def told(region: str, place: tuple[int, int]) -> dict[str, Any]:
    return {
        "shared_memory_region": region,
        "shared_memory_offset": place[0],
        "shared_memory_byte_size": place[1],
    }


OUTPUT = "pooled"
OUTPUT_PLACE = (64, 4096)


def body(inputs: list[Input], places: list[tuple[int, int]], request_id: str = "") -> bytes:
    request: dict[str, Any] = {
        "inputs": [
            one.head | {"parameters": told("ids", place)}
            for one, place in zip(inputs, places, strict=True)
        ],
        "outputs": [{"name": OUTPUT, "parameters": told("vectors", OUTPUT_PLACE)}],
        "parameters": {"output_dtype": "FP16"},
    }
    return json.dumps(request | ({"id": request_id} if request_id else {})).encode()


def message(inputs: list[Input], places: list[tuple[int, int]], request_id: str = "") -> bytes:
    asked = Asked([], (OUTPUT,), request_id, {"output_dtype": "FP16"})
    request = asked.message("shop", is_raw=True)
    tensors = [(request.outputs[0], "vectors", OUTPUT_PLACE)]
    for one, place in zip(inputs, places, strict=True):
        added = request.inputs.add(name=one.name, datatype=one.datatype, shape=one.sizes)
        tensors.append((added, "ids", place))  # type: ignore[arg-type]
    for tensor, region, place in tensors:
        for name, value in told(region, place).items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(tensor.parameters[name], kind, value)
    return request.SerializeToString(deterministic=True)


DECODERS: dict[str, tuple[Any, type[BodyDecoder | MessageDecoder]]] = {
    "REST": (body, BodyDecoder),
    "gRPC": (message, MessageDecoder),
}


@pytest.fixture(params=DECODERS)
def form(request: pytest.FixtureRequest) -> Any:
    """Returns (function that makes bodies, decoder for them)."""
    make, decoder = DECODERS[request.param]
    return make, decoder()


def with_min_seq(encoded: bytes, min_seq: int) -> bytes:
    """Adds a min_seq to a body or message."""
    if encoded.startswith(b"{"):
        told = json.loads(encoded)
        told["parameters"]["min_seq"] = min_seq
        return json.dumps(told).encode()
    request = pb.ModelInferRequest.FromString(encoded)
    request.parameters["min_seq"].int64_param = min_seq
    return request.SerializeToString(deterministic=True)


def contents(request: LookupRequest | None) -> tuple[object, ...]:
    assert request is not None
    assert request.output is not None
    answered = request.output.format_options
    assert isinstance(answered, ResponseOptions)
    places = answered.places
    assert places is not None
    assert request.weights is None
    return (
        (request.model, request.features, request.batch_size, request.output_dtype),
        (request.ids.tolist(), request.lengths.tolist(), request.output.has_all),
        {name: (id(one.region), one.offset, one.nbytes) for name, one in places.items()},
    )


def expected(bags: Mapping[str, list[list[Any]]], caller: Caller) -> tuple[object, ...]:
    ids = [one for of_feature in bags.values() for bag in of_feature for one in bag]
    lengths = [len(bag) for of_feature in bags.values() for bag in of_feature]
    return (
        ("shop", tuple(bags), 3, "float16"),
        (ids, lengths, True),
        {OUTPUT: (id(caller.regions["vectors"]), *OUTPUT_PLACE)},
    )


@pytest.mark.parametrize("gap", [0, 24])
def test_what_lies_there_now_is_read(caller: Callable[[str], Caller], form: Any, gap: int) -> None:
    make, decoder = form
    one = caller("one")
    asked = make(jagged(BAGS), one.put(jagged(BAGS), gap))
    assert decoder.of_placed.find(asked, LIMITS) is None
    for bags in (BAGS, OTHERS, BAGS):
        one.put(jagged(bags), gap)
        for read in (decoder.try_decode_inline, decoder.decode_request):
            assert contents(read(asked, "shop", LIMITS, regions=one.regions)) == expected(bags, one)
        assert decoder.of_placed.find(asked, LIMITS) is not None


def test_another_callers_regions_are_its_own(caller: Callable[[str], Caller], form: Any) -> None:
    make, decoder = form
    one, another = caller("one"), caller("another")
    asked = make(jagged(BAGS), one.put(jagged(BAGS)))
    another.put(jagged(OTHERS))
    for _ in range(2):
        request = decoder.try_decode_inline(asked, "shop", LIMITS, regions=one.regions)
        assert contents(request) == expected(BAGS, one)
        request = decoder.try_decode_inline(asked, "shop", LIMITS, regions=another.regions)
        assert contents(request) == expected(OTHERS, another)
    for regions, said in (
        ({}, "which is not registered"),
        ({"ids": one.regions["ids"]}, "^output 'pooled' .* 'vectors', which is not registered"),
        ({"vectors": one.regions["vectors"]}, r"^input 'user\.ids' .* 'ids', which is not"),
    ):
        with pytest.raises(UnknownRegionError, match=said):
            decoder.try_decode_inline(asked, "shop", LIMITS, regions=regions)
    with pytest.raises(InvalidRequestError, match="which this server does not use"):
        decoder.try_decode_inline(asked, "shop", LIMITS, regions=None)


@pytest.mark.parametrize(("name", "nbytes"), [("ids", 100), ("vectors", 4000)])
def test_a_region_that_is_shorter_now(
    caller: Callable[[str], Caller], form: Any, name: str, nbytes: int
) -> None:
    make, decoder = form
    one = caller("one")
    asked = make(jagged(BAGS), one.put(jagged(BAGS)))
    decoder.try_decode_inline(asked, "shop", LIMITS, regions=one.regions)
    shorter = one.regions | {name: one.opened(name, nbytes)}
    with pytest.raises(InvalidRequestError, match=f"region '{name}', which has {nbytes}$"):
        decoder.try_decode_inline(asked, "shop", LIMITS, regions=shorter)
    shorter[name].close()


def test_what_is_wrong_there_now_is_said(caller: Callable[[str], Caller], form: Any) -> None:
    make, decoder = form
    one = caller("one")
    asked = make(jagged(BAGS), one.put(jagged(BAGS)))
    decoder.try_decode_inline(asked, "shop", LIMITS, regions=one.regions)
    one.put(jagged(BAGS | {"user": [[4], [], []]}))
    with pytest.raises(InvalidRequestError, match=r"'user\.lengths' .* adds up to"):
        decoder.try_decode_inline(asked, "shop", LIMITS, regions=one.regions)
    one.cut()
    with pytest.raises(InvalidRequestError, match="'ids': its file was cut to 0 bytes"):
        decoder.try_decode_inline(asked, "shop", LIMITS, regions=one.regions)
    one.regions["ids"].close()
    with pytest.raises(InvalidRequestError, match="'ids': it is not registered any more"):
        decoder.try_decode_inline(asked, "shop", LIMITS, regions=one.regions)


def test_much_is_read_beside_the_event_loop(caller: Callable[[str], Caller], form: Any) -> None:
    make, decoder = form
    one = caller("one")
    bags = {"user": [list(range(INLINE_BYTES_MAX // 8)), [1], []]}
    asked = make(jagged(bags), one.put(jagged(bags)))
    for _ in range(2):
        assert decoder.try_decode_inline(asked, "shop", LIMITS, regions=one.regions) is None
        request = decoder.decode_request(asked, "shop", LIMITS, regions=one.regions)
        assert contents(request) == expected(bags, one)
    assert decoder.of_placed.find(asked, LIMITS) is not None


@pytest.mark.parametrize(
    "limits",
    [
        Limits(request_examples_max=2),
        Limits(request_ids_max=20),
        Limits(request_features_max=1),
        Limits(body_bytes_max=100),
    ],
)
def test_limits_are_kept_to(caller: Callable[[str], Caller], form: Any, limits: Limits) -> None:
    make, decoder = form
    one = caller("one")
    asked = make(jagged(BAGS), one.put(jagged(BAGS)))
    decoder.try_decode_inline(asked, "shop", LIMITS, regions=one.regions)
    with pytest.raises(RequestTooLargeError):
        decoder.try_decode_inline(asked, "shop", limits, regions=one.regions)


def test_what_is_of_no_form(caller: Callable[[str], Caller], form: Any) -> None:
    make, decoder = form
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
        asked = make(inputs, one.put(inputs), request_id)
        assert decoder.try_decode_inline(asked, "shop", LIMITS, regions=one.regions) is not None
        assert decoder.of_placed.find(asked, LIMITS) is None


def test_what_is_kept_is_bounded(caller: Callable[[str], Caller], form: Any) -> None:
    make, decoder = form
    one = caller("one")

    def ask(name: str) -> bytes:
        inputs = jagged({name: [[1]]})
        asked: bytes = make(inputs, one.put(inputs))
        decoder.decode_request(asked, "shop", LIMITS, regions=one.regions)
        return asked

    first = ask("first")
    every = [ask(f"f{at}") for at in range(TEMPLATES_MAX)]
    assert decoder.of_placed.find(first, LIMITS) is None
    assert all(decoder.of_placed.find(one, LIMITS) is not None for one in every)
    assert decoder.of_placed.find(ask("f" * TEMPLATE_BYTES_MAX), LIMITS) is None


def test_a_min_seq_is_read_and_such_requests_are_not_cached(
    form: Any, caller: Callable[[str], Caller]
) -> None:
    make, decoder = form
    one = caller("one")
    inputs = jagged(BAGS)
    plain = make(inputs, one.put(inputs))
    decoder.try_decode_inline(plain, "shop", LIMITS, regions=one.regions)
    before = [*decoder.of_placed.templates]
    assert before
    for seq in (7, 7, 8):
        encoded = with_min_seq(plain, seq)
        for decode in (decoder.try_decode_inline, decoder.decode_request):
            request = decode(encoded, "shop", LIMITS, regions=one.regions)
            assert request.min_seq == seq
            assert contents(request) == expected(BAGS, one)
    assert decoder.of_placed.templates == before
    again = decoder.try_decode_inline(plain, "shop", LIMITS, regions=one.regions)
    assert again.min_seq is None
