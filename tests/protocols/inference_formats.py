"""Formats of the Open Inference Protocol: JSON, binary tensors, messages and streams."""

from urllib.parse import quote

from grpc_messages import unframed
from protocols.formats import Format, Grpc, metadata, rest_headers
from protocols.requests import EncodedRequest, RawResponse, Request, Response, Vectors
from server.fake_engine import FakeEngine
from server.open_inference import LENGTH_HEADER, InferRequest, InferResponse, Input, jagged

from embedserve_proto import open_inference_pb2 as inference
from server import open_inference

FRACTIONS = InferRequest([Input("user", "FP32", [[1.5]])])
INFER = "/inference.GRPCInferenceService/ModelInfer"


def infer_request(request: Request) -> InferRequest:
    """Returns the tensors and parameters of a request in the Open Inference Protocol."""
    inputs = jagged(request.bags)
    for feature, weights in request.weights.items():
        flat = [one for bag in weights for one in bag]
        inputs.append(Input(f"{feature}.weights", "FP32", flat))
    parameters: dict[str, str | int] = {}
    if request.min_seq is not None:
        parameters["min_seq"] = request.min_seq
    if request.output_dtype:
        names = {"float16": "FP16", "float32": "FP32"}
        parameters["output_dtype"] = names.get(request.output_dtype, request.output_dtype)
    return InferRequest(inputs, list(request.output_keys), parameters=parameters)


def vectors_of_result(response: InferResponse) -> Vectors:
    parameters = dict(response.parameters)
    seq = parameters.pop("seq", None)
    counts: dict[str, dict[str, int]] = {"unknown_ids": {}, "missing_ids": {}}
    for name, count in parameters.items():
        kind, _, feature = name.partition(".")
        counts[kind][feature] = int(count)
    return Vectors(
        response.model,
        response.version,
        response.outputs,
        counts["unknown_ids"],
        seq=seq,
        missing_ids=counts["missing_ids"],
    )


class Infer(Format):
    """The Open Inference Protocol over REST, in JSON."""

    wrong_type = FRACTIONS.json_body(), "'user' (FP32 [1, 1]) is not INT64"
    is_text = True
    has_field = False
    can = frozenset({"model", "version", "dtype", "keys", "strings"})
    is_binary = False

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        model = quote(request.model or engine.model.name, safe="@")
        version = f"/versions/{request.version}" if request.version else ""
        headers: dict[str, str] = {}
        body = infer_request(request).json_body()
        if self.is_binary:
            body, headers = infer_request(request).binary_body()
        headers = {name.lower(): value for name, value in headers.items()}
        path = f"/v2/models/{model}{version}/infer"
        return EncodedRequest(path, rest_headers(request, **headers), body)

    def decode(self, raw: RawResponse) -> Vectors:
        kind = "application/octet-stream" if self.is_binary else "application/json"
        assert raw.headers["content-type"] == kind
        head = raw.headers.get(LENGTH_HEADER.lower())
        assert (head is not None) == self.is_binary
        return vectors_of_result(open_inference.read_body(raw.body, head))


class InferBinary(Infer):
    """The Open Inference Protocol over REST, with binary tensors."""

    is_text = False
    can = Infer.can | {"NaN"}
    is_binary = True


class InferMessage(Grpc):
    """The Open Inference Protocol over gRPC, with tensors as raw bytes or typed values."""

    wrong_type = (
        FRACTIONS.message("shop", is_raw=True).SerializeToString(),
        "'user' (FP32 [1, 1]) is not INT64",
    )
    can = Infer.can | {"NaN"}
    not_a_message = b"\xff"
    path = INFER
    is_raw = True

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        model = request.model or engine.model.name
        version = request.version
        message = infer_request(request).message(model, is_raw=self.is_raw, version=version)
        return EncodedRequest(self.path, metadata(request), message.SerializeToString())

    def decode(self, raw: RawResponse) -> Vectors:
        (message,) = unframed(raw.body)
        return vectors_of_result(
            open_inference.read_message(inference.ModelInferResponse.FromString(message))
        )


class InferTyped(InferMessage):
    is_raw = False


class InferStream(InferMessage):
    """The Open Inference Protocol over ModelStreamInfer, which sends an error as a message of the
    stream."""

    path = "/inference.GRPCInferenceService/ModelStreamInfer"

    def read(self, raw: RawResponse) -> Response:
        if raw.body:
            (data,) = unframed(raw.body)
            message = inference.ModelStreamInferResponse.FromString(data)
            if message.error_message:
                assert not message.HasField("infer_response")
                code, _, text = message.error_message.removeprefix("[").partition("] ")
                return Response(code, None, raw.headers, text)
            vectors = vectors_of_result(open_inference.read_message(message.infer_response))
            return Response("OK", None, raw.headers, vectors=vectors)
        return super().read(raw)
