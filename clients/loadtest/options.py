"""Locust's side of what REST and gRPC share: the custom arguments, and the traffic of a test.

Each argument is a flag, a LOADTEST_… variable and a field of the web form. When a test starts,
the server is asked for its models once; a test that cannot run is stopped with one line.
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
"""Name, default and help of each. The web form keeps the type of the default."""

ARGUMENTS: Arguments = (
    ("sizes", "1:90,50:9,500:1", "EXAMPLES:WEIGHT,… of the requests"),
    ("ids-max", 8, "ids of a bag, from 0 to this"),
    ("zipf", 1.05, "exponent of the ids' distribution, 0 is uniform"),
    ("model", "", "served model; empty is the server's default"),
    ("vocabularies", "", "TABLE=FILE,… with an id a line, for tables that map ids"),
    ("stream-depth", 8, "requests under way on each gRPC stream"),
    ("timeout-s", 10.0, "of each request but those of streams"),
    ("seed", 0, "equal seeds give equal requests"),
)


def add_to(parser: LocustArgumentParser, arguments: Arguments) -> None:
    """Not in a group of their own: the web form would not have them."""
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
    """What the users of one test share: its traffic and its options."""

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
        # Workers of a distributed test have users of their own.
        worker = getattr(environment.runner, "worker_index", 0)
        self._users = count(max(worker, 0) * 2**32)

    def random(self) -> Any:
        """The generator of the next user."""
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
    """The test that starts, None where no users run; ends a test that cannot run, and says why."""
    if isinstance(environment.runner, MasterRunner):
        return None
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        test = LoadTest(environment, list_models())
    except (ValueError, OSError, EmbedServeClientError) as error:
        said = f"the load test cannot run: {error}"
        if environment.web_ui is not None:
            raise StopTest(said) from None
        # Locust would go on without users until its run time is over.
        logging.error(said)
        sys.exit(1)
    test.warn()
    return test


def _options_of(environment: Environment) -> Any:
    """The arguments by name, among them ours."""
    return environment.parsed_options
