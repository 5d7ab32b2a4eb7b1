"""A small embedserve server for the client's tests: exact responses, and every failure on demand.

`FakeModel` pools ids from two small tables of integers. Its model "sequence" returns the row of
TITLES for each string, zeros for an unknown one. `rest_app` and `grpc_server` serve it. They are
written from the contract alone and share no code with the real server.
A request to the model "fail:CODE" fails with that code. `FakeModel.rejections` lists the codes that
the next requests fail with, before others succeed. "old" is "shop" on a server from before
output_dtype: it returns float32 and does not report the type.
"""

import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import uvicorn
from google.protobuf import json_format

from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import embedding_pb2_grpc as pb_grpc

RESPONSE_S_MAX = 60
KEEP_ALIVE_S = 300
"""Seconds that the REST fake keeps an idle connection open."""
ROWS = 100
DIMS = {"user": 2, "movie": 4}
KEYS = ("user", "movie")
TABLES = {
    key: np.arange(ROWS * dim, dtype=np.float32).reshape(ROWS, dim) for key, dim in DIMS.items()
}
TITLES = {"Heat": (1.0, 2.0), "Alien": (3.0, 4.0)}
HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class FakeError(Exception):
    """The fake's own error; ``field`` is the contract's."""

    def __init__(self, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.field = code, message, field


def pooled(key: str, bags: list[list[int]]) -> np.ndarray:
    """Returns the sums over the rows of each bag."""
    return np.stack([TABLES[key][bag].sum(axis=0) for bag in bags])


def _bytes_of(values: np.ndarray, output_dtype: int) -> bytes:
    with np.errstate(over="ignore"):  # values that are too large become infinite
        return values.astype("<f2" if output_dtype == pb.FLOAT16 else "<f4").tobytes()


class FakeModel:
    """Model "shop", version 7; records the requests and headers that it receives."""

    def __init__(self) -> None:
        self.requests: list[pb.EmbedRequest] = []
        self.timeouts_ms: list[str | None] = []
        self.rejections: list[str] = []
        self.slow_s = 0.0
        self.retry_after_s = 3
        self.may_respond = threading.Event()
        self.may_respond.set()
        self.stream_ended = threading.Event()

    def embed(self, request: pb.EmbedRequest) -> pb.EmbedResponse:
        self.requests.append(request)
        time.sleep(self.slow_s)
        assert self.may_respond.wait(RESPONSE_S_MAX)
        if self.rejections:
            raise FakeError(self.rejections.pop(0), "ordered by the test")
        if request.model.startswith("fail:"):
            raise FakeError(request.model[5:], "ordered by the test")
        if request.model == "sequence":
            return self._sequence(request)
        if request.model not in ("", "shop", "old"):
            raise FakeError("NOT_FOUND", f"no model {request.model!r}")
        lengths = np.frombuffer(request.lengths_bytes, "<i4").reshape(len(request.keys), -1)
        values = self._values(request, lengths)
        output_dtype = pb.FLOAT32 if request.model == "old" else request.output_dtype
        return pb.EmbedResponse(
            model="shop",
            version=7,
            keys=KEYS,
            length_per_key=[DIMS[key] for key in KEYS],
            batch_size=lengths.shape[1],
            values=_bytes_of(values, output_dtype),
            output_dtype=output_dtype,
        )

    def _sequence(self, request: pb.EmbedRequest) -> pb.EmbedResponse:
        assert list(request.string_keys) == list(request.keys) == ["title"]
        assert not request.ids_bytes
        lengths = np.frombuffer(request.lengths_bytes, "<i4").tolist()
        assert sum(lengths) == len(request.string_ids)
        rows = [TITLES.get(title, (0.0, 0.0)) for title in request.string_ids]
        unknown = sum(title not in TITLES for title in request.string_ids)
        return pb.EmbedResponse(
            model="sequence",
            version=7,
            keys=["title"],
            length_per_key=[2],
            batch_size=len(lengths),
            values=_bytes_of(np.array(rows, np.float32), request.output_dtype),
            output_dtype=request.output_dtype,
            lengths=lengths,
            unknown_ids={"title": unknown} if unknown else {},
        )

    def _values(self, request: pb.EmbedRequest, lengths: np.ndarray) -> np.ndarray:
        ids = np.frombuffer(request.ids_bytes, "<i8")
        weights = np.frombuffer(request.weights_bytes, "<f4")
        weights = weights if request.weights_bytes else np.ones(len(ids), np.float32)
        answer = {key: np.zeros((lengths.shape[1], DIMS[key]), np.float32) for key in KEYS}
        at = 0
        for key, row in zip(request.keys, lengths, strict=True):
            for example, length in enumerate(row):
                for index in range(at, at + length):
                    if not 0 <= ids[index] < ROWS:
                        field = f"features.{key}[{example}]"
                        raise FakeError("INVALID_ARGUMENT", f"{field}: no row {ids[index]}", field)
                    answer[key][example] += weights[index] * TABLES[key][ids[index]]
                at += length
        assert at == len(ids)
        return np.concatenate([answer[key] for key in KEYS], axis=1)

    def models(self) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self.model("shop")], default_model="shop")

    def model(self, name: str) -> pb.Model:
        if name != "shop":
            raise FakeError("NOT_FOUND", f"no model {name!r}")
        table = pb.Table(
            name="t_user",
            num_embeddings=ROWS,
            embedding_dim=2,
            pooling="sum",
            dtype="int8",
            features=["user"],
            sharding="row_wise",
            ids=pb.IdRule(
                rule="map",
                id_type="string",
                entries=9,
                unknown="row",
                default_row=3,
                examples=["Heat"],
            ),
        )
        return pb.Model(
            model="shop",
            version=7,
            features=KEYS,
            keys=KEYS,
            length_per_key=[2, 4],
            tables=[table],
        )


class SilentModel(FakeModel):
    """A model that sends no response until ``may_respond`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = threading.Event()
        self.may_respond.clear()

    def embed(self, request: pb.EmbedRequest) -> pb.EmbedResponse:
        self.requested.set()
        return super().embed(request)


def rest_app(current: Callable[[], FakeModel]) -> Callable[..., Awaitable[None]]:
    """Returns the REST server as an ASGI app; ``current`` returns the model of each request."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        model = current()
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event.get("body", b""), event.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        try:
            status, kind, answer = 200, *_route(model, scope, headers, body)
        except FakeError as error:
            status, kind, answer = HTTP_STATUS[error.code], "application/json", _json_of(error)
        fields = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(answer))]
        if status == 429:
            fields.append((b"retry-after", b"%d" % model.retry_after_s))
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": answer})

    return app


def _route(
    model: FakeModel, scope: dict[str, Any], headers: dict[str, str], body: bytes
) -> tuple[str, bytes]:
    route = scope["method"], scope["raw_path"].decode()
    if route == ("POST", "/embed"):
        assert headers["content-type"] == headers["accept"] == "application/x-protobuf"
        model.timeouts_ms.append(headers.get("x-timeout-ms"))
        answer = model.embed(pb.EmbedRequest.FromString(body))
        return "application/x-protobuf", answer.SerializeToString()
    if route == ("GET", "/models"):
        return "application/json", _json(model.models())
    if route[0] == "GET" and route[1].startswith("/models/"):
        return "application/json", _json(model.model(route[1].removeprefix("/models/")))
    raise AssertionError(f"the contract has no {route}")


def _json(message: Any) -> bytes:
    text = json_format.MessageToJson(message, preserving_proto_field_name=True)
    return json.dumps(json.loads(text) | {"newer_field": 1}).encode()


def _json_of(error: FakeError) -> bytes:
    fields = {"code": error.code, "message": error.message, "field": error.field}
    return json.dumps({"error": fields}).encode()


class Servicer(pb_grpc.EmbeddingServiceServicer):
    """The gRPC server's methods."""

    def __init__(self, model: FakeModel) -> None:
        self.model = model

    def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        answer: pb.EmbedResponse = _or_abort(context, lambda: self.model.embed(request))
        return answer

    def EmbedStream(self, requests: Iterator[pb.EmbedRequest], context: Any) -> Any:
        context.add_callback(self.model.stream_ended.set)
        for request in requests:
            if request.model == "cut":
                return
            if request.model == "abort":
                context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
            if request.model == "full":
                context.set_trailing_metadata((("retry-after", "7"), ("embedserve-field", "ids")))
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
            try:
                yield self.model.embed(request)
            except FakeError as error:
                yield pb.EmbedResponse(
                    error=pb.Error(code=error.code, message=error.message, field=error.field)
                )
            if request.model == "twice":
                yield pb.EmbedResponse(model="shop")

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return self.model.models()

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.Model:
        model: pb.Model = _or_abort(context, lambda: self.model.model(request.model))
        return model


def _or_abort(context: Any, answer: Callable[[], Any]) -> Any:
    try:
        return answer()
    except FakeError as error:
        context.abort(grpc.StatusCode[error.code], error.message)


@dataclass
class RestFake:
    """A running REST server and its model, which may be replaced between requests."""

    url: str
    model: FakeModel


@contextmanager
def rest_server(model: FakeModel | None = None, port: int = 0) -> Iterator[RestFake]:
    """Serves the fake over REST on a loopback port. Port 0 is any free port."""
    fake = RestFake("", model or FakeModel())
    app = rest_app(lambda: fake.model)
    config = uvicorn.Config(
        app,
        port=port,
        log_level="error",
        lifespan="off",
        access_log=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    fake.url = f"http://127.0.0.1:{port}"
    yield fake
    server.should_exit = True
    thread.join()


@contextmanager
def grpc_server(model: FakeModel, port: int = 0) -> Iterator[str]:
    """Serves the fake over gRPC on a loopback port; yields its target. Port 0 is any free port."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool)
        pb_grpc.add_EmbeddingServiceServicer_to_server(Servicer(model), server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(grace=None).wait()
