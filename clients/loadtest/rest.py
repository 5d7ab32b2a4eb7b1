"""Load over REST: JSON and protobuf requests in equal numbers; --tags json or protobuf selects one.

    locust -f clients/loadtest/rest.py --headless -u 16 -r 16 -t 10s --host http://127.0.0.1:8000

Each user is one connection, and sends the next request after the previous response. A rejected
request (429, the queue is full) is the failure "refused" in a separate row. Other failures, such as
timeouts, are in the rows of the successful requests, and their times count there.
"""

import json
from typing import Any
from urllib.parse import quote

from locust import FastHttpUser, events, tag, task
from locust.env import Environment

from embedserve_client import EmbedClient, EmbedServeClientError
from embedserve_client.core.addresses import base_url_of, unix_path_of
from embedserve_client.core.messages import AnswerReader
from options import LoadTest, prepare
from traffic import Request, kind_of_error, name_of

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


class RestUser(FastHttpUser):
    """A user that sends POST /models/{model}/embed."""

    test: LoadTest

    def on_start(self) -> None:
        self.random = self.test.random()
        self.answers = AnswerReader()
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
        # The type hint of data omits bytes, which are sent unchanged.
        data: Any = body
        with self.client.post(
            self.path, data=data, headers=headers, name=name, catch_response=True
        ) as response:
            if response.status_code == 200:
                _check(response, content_type, request, self.answers)
            elif response.status_code:
                _fail(response, name)


def _check(response: Any, content_type: str, request: Request, answers: AnswerReader) -> None:
    """Checks a successful response. JSON is not parsed, because parsing would cost the load
    generator more than the server."""
    if response.headers.get("Content-Type") != content_type or not response.content:
        response.failure(f"an answer that is no {content_type}")
    elif content_type == PROTOBUF:
        try:
            answers.read_bytes(response.content, request.examples)
        except EmbedServeClientError as error:
            response.failure(kind_of_error("INTERNAL", str(error)))


def _fail(response: Any, name: str) -> None:
    status = response.status_code
    response.failure(kind_of_error(str(status), _message_of(response.content)))
    if status == 429:
        response.request_meta["name"] = f"{name}, refused"


def _message_of(body: bytes) -> str:
    """Returns the message of an embedserve error; a fixed text for other bodies, such as a
    proxy's."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no error of embedserve"


@events.test_start.add_listener
def start(environment: Environment, **_: Any) -> None:
    def list_models() -> Any:
        host = environment.host or ""
        if unix_path_of(host) is not None:
            raise ValueError(f"--host: {host!r} is a Unix socket, which Locust cannot use")
        environment.host = base_url_of(host)  # "http://" if there is no scheme
        with EmbedClient(environment.host) as client:
            return client.models()

    test = prepare(environment, list_models)
    if test is not None:
        RestUser.test = test
        RestUser.network_timeout = RestUser.connection_timeout = test.options.timeout_s
