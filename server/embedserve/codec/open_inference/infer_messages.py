"""Decodes requests of ModelInfer at the byte level.

message_template.py reads messages that differ from an earlier message only in their numbers. The
protobuf library parses other small messages. In larger messages numbers are located in place, and
fields are counted before they become Python objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from google.protobuf.message import DecodeError

from embedserve.codec.open_inference.message_contents import (
    CONTENTS_TAGS,
    Contents,
    from_contents,
    from_message,
    raw_strings,
)
from embedserve.codec.open_inference.message_template import (
    INLINE_JAGGED_BYTES_MAX,
    TEMPLATE_INPUTS_MAX,
    MessageTemplate,
    MessageTemplateCache,
)
from embedserve.codec.open_inference.outputs import (
    MIN_SEQ,
    classification_error,
    set_output,
    set_output_dtype,
    versioned,
)
from embedserve.codec.open_inference.shared_memory_template import (
    SharedMemoryTemplateCache,
    read_request,
)
from embedserve.codec.open_inference.shared_memory_tensors import (
    INLINE_TEXT_BYTES_MAX,
    LocatedTensor,
    is_in_shared_memory,
    location_in,
)
from embedserve.codec.open_inference.tensors import BYTES, InputTensor, count_bags_and_ids, wrong
from embedserve.codec.protobuf_fields import (
    TooManyFieldsError,
    extract_fields,
    field_tag,
    fields,
    read_varints,
)
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.lookup_types import LookupRequest, WouldBlockError
from embedserve.request_checks import check_min_seq
from embedserve.shared_memory.region import Regions
from embedserve_proto import open_inference_pb2 as pb

_Request = pb.ModelInferRequest
_InputMessage = pb.ModelInferRequest.InferInputTensor
SMALL_BYTES = 16 << 10
"""Bytes of a message, without its raw contents, that the protobuf library parses whole. This costs
the event loop a few hundred microseconds at most."""
INLINE_FIELDS_MAX = 4096
"""Fields of a message that is decoded, or whose size is estimated, on the event loop's thread."""

INPUTS_TAG = field_tag(_Request, "inputs")
MODEL_TAG = field_tag(_Request, "model_name")
VERSION_TAG = field_tag(_Request, "model_version")
RAW_TAG = field_tag(_Request, "raw_input_contents")
NAME_TAG = field_tag(_InputMessage, "name")
SHAPE_TAG = field_tag(_InputMessage, "shape")
SHAPE_BYTES_MAX = 40
"""Bytes of a shape that a size is estimated from. A valid shape has one or two numbers."""
CONTENTS_TAG = field_tag(_InputMessage, "contents")
_Parsed = tuple[pb.ModelInferRequest, Sequence[bytes | memoryview], Sequence[Contents] | None]
"""(message, its raw_input_contents, the contents of each input if they were extracted from the
message, None if they are still in it)."""


class MessageDecoder:
    """Decodes ModelInferRequest messages. It caches their templates."""

    def __init__(self) -> None:
        self.templates = MessageTemplateCache()
        self.shared_memory_templates = SharedMemoryTemplateCache()

    def decode_request(
        self,
        body: bytes,
        model: str,
        limits: Limits,
        regions: Regions | None = None,
        *,
        is_inline: bool = False,
    ) -> LookupRequest:
        """Returns the ModelInferRequest in ``body``, which names its model itself.

        Args:
            regions: shared-memory regions of the caller; None if the server has no shared memory.

        Raises:
            InvalidRequestError: the body is not a ModelInferRequest, or not a batch of jagged ids.
            RequestTooLargeError: the body has more than ``limits`` allow. Raised before it is
                decoded.
            WouldBlockError: ``is_inline``, and it would take long.
        """
        if is_inline:
            if len(body) > INLINE_JAGGED_BYTES_MAX:
                raise WouldBlockError
            request = self.templates.read(body, limits)
            if request is not None:
                return request
        if regions:
            request = self.shared_memory_templates.read(
                body, regions, limits, None, is_inline=is_inline
            )
            if request is not None:
                return request
        parsed = _parse_inline(body, limits) if is_inline else _parse_any(body, limits)
        request = self._request(body, *parsed, limits, regions, is_inline=is_inline)
        if is_inline:
            message, raw, _ = parsed
            self._cache_template(body, message, raw, request, limits)
        return request

    def _cache_template(
        self,
        body: bytes,
        message: pb.ModelInferRequest,
        raw: Sequence[bytes | memoryview],
        request: LookupRequest,
        limits: Limits,
    ) -> None:
        """Caches the template of a message whose inputs are all raw. Templates of inputs in shared
        memory are cached by shared_memory_template.py."""
        if any(one.parameters for one in message.outputs):
            return
        inputs = len(message.inputs)
        is_plain = len(raw) == inputs == 2 * len(request.features) and not request.string_features
        if is_plain and inputs <= TEMPLATE_INPUTS_MAX:
            model = message.model_name, message.model_version
            outputs = [one.name for one in message.outputs]
            self.templates.cache_template(
                body, MessageTemplate(model, request.model, request.features, outputs), limits
            )

    def _request(
        self,
        body: bytes,
        message: pb.ModelInferRequest,
        raw: Sequence[bytes | memoryview],
        contents: Sequence[Contents] | None,
        limits: Limits,
        regions: Regions | None,
        *,
        is_inline: bool,
    ) -> LookupRequest:
        """Returns the request in ``message``, which _Parsed describes, of the bytes ``body``."""
        are_shared = [is_in_shared_memory(one.parameters) for one in message.inputs]
        if raw and len(raw) != are_shared.count(False):
            raise InvalidRequestError(
                f"raw_input_contents has {len(raw)} entries for {are_shared.count(False)} inputs",
                "raw_input_contents",
            )
        tensors: list[InputTensor] = []
        located: list[LocatedTensor] = []
        left = iter(raw)
        for at, one in enumerate(message.inputs):
            tensor = InputTensor(one.name, one.datatype, one.shape[:], b"")
            tensors.append(tensor)
            has_contents = one.HasField("contents") or (contents is not None and bool(contents[at]))
            if are_shared[at]:
                if has_contents:
                    raise wrong(tensor, "has both contents and a region of shared memory: send one")
                located.append((tensor, location_in(one.parameters, tensor, regions)))
            elif not raw:
                if contents is not None:
                    tensor.data = from_contents(tensor, contents[at], limits)
                else:
                    tensor.data = from_message(tensor, one)
            elif has_contents:
                raise wrong(tensor, "has contents, but there are raw_input_contents: send one")
            else:
                data = next(left)
                tensor.data = raw_strings(tensor, data, limits) if one.datatype == BYTES else data
        model = versioned(message.model_name, message.model_version)
        request, template = read_request(
            model, tensors, located, regions, limits, is_inline=is_inline
        )
        outputs = message.outputs
        names = [one.name for one in outputs]
        locations = {
            one.name: location_in(one.parameters, one.name, regions)
            for one in outputs
            if _is_output_in_shared_memory(one)
        }
        set_output(
            request, message.id, names, (True,) * len(names), True, limits, locations or None
        )
        if "output_dtype" in message.parameters:
            set_output_dtype(request, message.parameters["output_dtype"].string_param)
        if "min_seq" in message.parameters:
            parameter = message.parameters["min_seq"]
            kind = parameter.WhichOneof("parameter_choice")
            value = getattr(parameter, kind) if kind else ""
            request.min_seq = check_min_seq(MIN_SEQ, value)
        if template is not None and not message.id and request.min_seq is None:
            self.shared_memory_templates.cache_template(body, template, request)
        return request


def peek_model(body: bytes) -> str:
    """Returns the model that a ModelInferRequest names, without decoding the rest; "" if it names
    none. A model with a version is returned as "MODEL@VERSION".

    Serializers write fields in their order, so that the model and its version come first.
    """
    named = {MODEL_TAG: "", VERSION_TAG: ""}
    try:
        for tag, _, start, end in islice(fields(body), len(named)):
            if tag in named:
                named[tag] = body[start:end].decode(errors="replace")
    except ValueError:
        pass
    model, version = named[MODEL_TAG], named[VERSION_TAG]
    return f"{model}@{version}" if version else model


def estimate_size(body: bytes) -> tuple[int, int]:
    """Returns (bags, ids) according to the shapes in a ModelInferRequest. Returns (0, 0) for an
    invalid message, and for more than INLINE_FIELDS_MAX fields."""
    inputs = []
    try:
        taken, _, _ = extract_fields(body, {INPUTS_TAG: "inputs"}, INLINE_FIELDS_MAX)
        fields_left = INLINE_FIELDS_MAX
        for one in taken.get("inputs", ()):
            name, sizes = "", b""
            for tag, _, start, end in islice(fields(bytes(one)), fields_left):
                fields_left -= 1
                if tag == NAME_TAG:
                    name = bytes(one[start:end]).decode(errors="replace")
                elif tag == SHAPE_TAG and end - start <= SHAPE_BYTES_MAX:
                    sizes = bytes(one[start:end])
            inputs.append((name, read_varints(sizes).tolist()))
    except (TooManyFieldsError, ValueError):
        return 0, 0
    bags, ids = count_bags_and_ids(inputs)
    return min(bags, len(body)), min(ids, len(body))


def _is_output_in_shared_memory(output: pb.ModelInferRequest.InferRequestedOutputTensor) -> bool:
    """Returns whether ``output`` is requested in shared memory. Raises InvalidRequestError for a
    classification."""
    parameters = output.parameters
    if "classification" in parameters and parameters["classification"].int64_param:
        raise classification_error(output.name)
    return is_in_shared_memory(parameters)


def _parse_inline(body: bytes, limits: Limits) -> _Parsed:
    """Parses a message by the protobuf library. Raises WouldBlockError for a large one."""
    small_bytes = min(SMALL_BYTES, limits.request_values_max, limits.request_text_bytes_max)
    if len(body) <= small_bytes:
        message = _parse(body)
        return message, message.raw_input_contents, None
    fields_max = min(INLINE_FIELDS_MAX, limits.request_values_max)
    try:
        taken, rest, _ = extract_fields(body, {RAW_TAG: "raw"}, fields_max)
    except ValueError as error:
        raise _malformed(error) from error
    except TooManyFieldsError as error:
        raise WouldBlockError from error
    if sum(map(len, rest)) > small_bytes:
        raise WouldBlockError
    raw, message = taken.get("raw", []), _parse(b"".join(rest))
    inputs = [one for one in message.inputs if not is_in_shared_memory(one.parameters)]
    texts = zip(raw, inputs, strict=False)
    if sum(len(one) for one, of in texts if of.datatype == BYTES) > INLINE_TEXT_BYTES_MAX:
        raise WouldBlockError
    return message, raw, None


def _parse_any(body: bytes, limits: Limits) -> _Parsed:
    """Parses a message of any size, without its numbers."""
    try:
        raw, inputs, rest = _take_inputs(body, limits)
    except TooManyFieldsError as error:
        raise RequestTooLargeError(
            "body has too many tensors, strings and numbers that are not packed: "
            + limits.describe("request_values_max"),
            "body",
        ) from error
    text_bytes = sum(map(len, rest)) + sum(
        sum(map(len, contents.get("bytes_contents", ()))) for contents, _ in inputs
    )
    text_bytes += sum(len(of_input) for _, of_input in inputs)
    if text_bytes > limits.request_text_bytes_max:
        raise RequestTooLargeError(
            f"body has {text_bytes} bytes beside its numbers, "
            + limits.describe("request_text_bytes_max"),
            "body",
        )
    message = _parse(b"".join(rest))
    for _, of_input in inputs:
        try:
            message.inputs.add().MergeFromString(of_input)
        except DecodeError as error:
            raise _malformed(error) from error
    return message, raw, [contents for contents, _ in inputs]


def _parse(body: bytes) -> pb.ModelInferRequest:
    try:
        return _Request.FromString(body)
    except DecodeError as error:
        raise _malformed(error) from error


def _malformed(problem: object) -> InvalidRequestError:
    return InvalidRequestError(f"body is not a ModelInferRequest: {problem}", "body")


def _take_inputs(
    body: bytes, limits: Limits
) -> tuple[list[memoryview], list[tuple[Contents, bytes]], list[memoryview]]:
    """Returns (raw_input_contents, inputs, the chunks of the message without both). Each input is
    (its contents, the input's message without them)."""
    left = limits.request_values_max  # fields, at all depths
    try:
        tags = {RAW_TAG: "raw", INPUTS_TAG: "inputs"}
        taken, rest, count = extract_fields(body, tags, left)
        left -= count
        inputs = []
        for one in taken.get("inputs", ()):
            of_input, others, count = extract_fields(bytes(one), {CONTENTS_TAG: "contents"}, left)
            left -= count
            contents: Contents = {}
            for serialized in of_input.get("contents", ()):  # parsers merge repeated contents
                numbers, _, count = extract_fields(bytes(serialized), CONTENTS_TAGS, left)
                left -= count
                for name, values in numbers.items():
                    contents.setdefault(name, []).extend(values)
            inputs.append((contents, b"".join(others)))
    except ValueError as error:
        raise _malformed(error) from error
    return taken.get("raw", []), inputs, rest
