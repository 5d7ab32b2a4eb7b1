"""Locust integration shared by REST and gRPC: the custom arguments, and the traffic of a test.

Each argument is a flag, a LOADTEST_… variable and a field of the web form. When a test starts, it
requests the list of models once. A test that cannot run stops with a one-line message.
"""

import logging
import sys
from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias

from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import MasterRunner

from embedserve_client import EmbedServeClientError, ModelList
from ids import read_vocabularies
from traffic import Settings, Traffic, choose_model, parse_sizes

Arguments: TypeAlias = tuple[tuple[str, Any, str], ...]
"""(name, default, help) of each argument. The web form keeps the type of the default."""

ARGUMENTS: Arguments = (
    ("sizes", "1:90,50:9,500:1", "EXAMPLES:WEIGHT,… of the requests"),
    ("ids-max", 8, "ids of a bag, from 0 to this"),
    ("zipf", 1.05, "exponent of the ids' distribution, 0 is uniform"),
    ("model", "", "NAME, NAME@ALIAS or NAME@VERSION; empty is the server's default"),
    ("vocabularies", "", "TABLE=FILE,… with an id a line, for tables that map ids"),
    ("stream-depth", 8, "requests in flight on each gRPC stream"),
    ("timeout-s", 10.0, "of each request but those of streams"),
    ("seed", 0, "equal seeds give equal requests"),
)


def add_to(parser: LocustArgumentParser, arguments: Arguments) -> None:
    """Adds the arguments to the parser itself, because the web form omits argument groups."""
    for name, default, explanation in arguments:
        parser.add_argument(
            f"--{name}",
            type=type(default),
            default=default,
            env_var=f"LOADTEST_{name.upper().replace('-', '_')}",
            help=f"{explanation} (default: {default!r})",
        )


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    add_to(parser, ARGUMENTS)


class LoadTest:
    """State that the users of one test share: its traffic and its options."""

    def __init__(self, environment: Environment, models: ModelList) -> None:
        self.options = _options_of(environment)
        settings = Settings(
            parse_sizes(self.options.sizes),
            self.options.ids_max,
            self.options.zipf,
            self.options.seed,
        )
        if self.options.stream_depth < 1:
            raise ValueError(f"--stream-depth: {self.options.stream_depth} is less than 1")
        if not 0 < self.options.timeout_s < float("inf"):
            raise ValueError(f"--timeout-s: {self.options.timeout_s} is not positive")
        vocabularies = read_vocabularies(self.options.vocabularies)
        self.traffic = Traffic(choose_model(models, self.options.model), settings, vocabularies)
        # Each worker of a distributed test numbers its own range of users.
        worker = getattr(environment.runner, "worker_index", 0)
        self._users = count(max(worker, 0) * 2**32)

    def random(self) -> Any:
        """Returns the random generator of the next user."""
        return self.traffic.random(next(self._users))

    def warn(self) -> None:
        if self.traffic.skipped:
            logging.warning(
                "left out, their ids are not known without --vocabularies: %s",
                ", ".join(self.traffic.skipped),
            )
        if self.traffic.guessed:
            logging.warning(
                "ids are guessed and mostly unknown to the server without --vocabularies: %s",
                ", ".join(self.traffic.guessed),
            )


def prepare(environment: Environment, list_models: Callable[[], ModelList]) -> LoadTest | None:
    """Returns the test to start, or None in a process that runs no users. Stops a test that cannot
    run, with the reason."""
    if isinstance(environment.runner, MasterRunner):
        return None
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        test = LoadTest(environment, list_models())
    except (ValueError, OSError, EmbedServeClientError) as error:
        said = f"the load test cannot run: {error}"
        if environment.web_ui is not None:
            raise StopTest(said) from None
        # Otherwise Locust would idle without users until the end of the run time.
        logging.error(said)
        sys.exit(1)
    test.warn()
    return test


def _options_of(environment: Environment) -> Any:
    """Returns the parsed arguments, including the custom ones."""
    return environment.parsed_options
