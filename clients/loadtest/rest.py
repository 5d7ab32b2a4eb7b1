"""Load over REST: JSON and protobuf answers, weighted 1 to 1; --tags json or protobuf takes one.

    locust -f clients/loadtest/rest.py --headless -u 16 -r 16 -t 10s --host http://127.0.0.1:8000

Each user is one connection, and sends the next request when the last is answered. A refused
request (429, the queue is full) is a failure "refused" under a name of its own, so that the
other rows hold the latencies of answered requests alone.
"""

import json
from typing import Any
from urllib.parse import quote

from locust import FastHttpUser, events, tag, task
from locust.env import Environment

from embedserve_client import EmbedClient
from embedserve_proto import embedding_pb2 as pb
from options import LoadTest, prepare
from traffic import Request, kind_of_error, name_of

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


class RestUser(FastHttpUser):
    """A caller of POST /models/{model}/embed."""

    test: LoadTest

    def on_start(self) -> None:
        self.random = self.test.random()
        self.timeout_s = self.test.options.timeout_s
        self.path = f"/models/{quote(self.test.traffic.model, safe='')}/embed"

    @tag("json")
    @task
    def embed_json(self) -> None:
        request = self.test.traffic.request(self.random)
        self._send("JSON", JSON, request, request.json())

    @tag("protobuf")
    @task
    def embed_protobuf(self) -> None:
        request = self.test.traffic.request(self.random)
        self._send("protobuf", PROTOBUF, request, request.message().SerializeToString())

    def _send(self, way: str, content_type: str, request: Request, body: bytes) -> None:
        headers = {
            "Content-Type": content_type,
            "Accept": content_type,
            "X-Timeout-Ms": str(max(1, round(self.timeout_s * 1000))),
        }
        name = name_of(way, request.examples)
        # The type hint of data forgets bytes, which are sent as they are.
        data: Any = body
        with self.client.post(
            self.path, data=data, headers=headers, name=name, catch_response=True
        ) as response:
            if response.status_code == 200:
                _check(response, content_type, request)
            elif response.status_code:
                _fail(response, name)


def _check(response: Any, content_type: str, request: Request) -> None:
    """JSON is not parsed: that would cost the loading side more than the serving side."""
    if response.headers.get("Content-Type") != content_type or not response.content:
        response.failure(f"an answer that is no {content_type}")
    elif content_type == PROTOBUF:
        answered = pb.EmbedResponse.FromString(response.content).batch_size
        if answered != request.examples:
            response.failure("an answer of another batch size")


def _fail(response: Any, name: str) -> None:
    status = response.status_code
    response.failure(kind_of_error(str(status), _message_of(response.content)))
    if status == 429:
        response.request_meta["name"] = f"{name}, refused"


def _message_of(body: bytes) -> str:
    """The error's message in a body of ours; of a proxy's, nothing."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no error of embedserve"


@events.test_start.add_listener
def start(environment: Environment, **_: Any) -> None:
    def list_models() -> Any:
        with EmbedClient(environment.host or "") as client:
            return client.models()

    test = prepare(environment, list_models)
    if test is not None:
        RestUser.test = test
        RestUser.network_timeout = RestUser.connection_timeout = test.options.timeout_s
