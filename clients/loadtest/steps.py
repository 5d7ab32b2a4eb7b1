"""Load that grows in steps; as an additional locustfile it replaces -u, -r and -t.

    locust -f clients/loadtest/rest.py,clients/loadtest/steps.py --headless \\
        --host http://127.0.0.1:8000 --step-users 8 --step-s 20 --steps 6

After each step one line reports the figures of that step alone, without its first second. Its
latencies are those of all requests, also of failed and rejected ones. The number of users at which
requests/s stop growing is the limit of one server, or of the load generator.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.stats import StatsEntry, calculate_response_time_percentile

from options import Arguments, add_to

SETTLE_S = 1.0
STEP_S_MIN = 3.0
"""Seconds of a step, at least. Locust ticks once a second, so that a shorter step may have no whole
second after it has settled."""
ARGUMENTS: Arguments = (
    ("step-users", 8, "users that each step adds"),
    ("step-s", 20.0, "seconds of a step"),
    ("steps", 6, "steps"),
)


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    add_to(parser, ARGUMENTS)


@dataclass(frozen=True)
class Counts:
    """Totals of locust at one moment; times_ms counts requests by rounded latency."""

    at_s: float
    requests: int
    failures: int
    times_ms: Counter[int]


class Steps(LoadTestShape):
    """Shape of the load: step_users users in the first step, and as many more in each further
    step."""

    def reset_time(self) -> None:
        super().reset_time()
        self._step = 0
        self._before: Counts | None = None

    def tick(self) -> tuple[int, float] | None:
        options = self._options()
        wrong = _what_is_wrong(options)
        if wrong:
            logging.error("the load test cannot run: %s", wrong)
            self.runner.environment.process_exit_code = 1  # type: ignore[union-attr]
            return None
        run_s = self.get_run_time()
        step = int(run_s // options.step_s)
        if step != self._step:
            self._say((self._step + 1) * options.step_users)
            self._step, self._before = step, None
        if self._before is None and run_s % options.step_s >= SETTLE_S:
            self._before = self._counts()
        if step >= options.steps:
            return None
        return (step + 1) * options.step_users, max(100.0, options.step_users)

    def _options(self) -> Any:
        return self.runner.environment.parsed_options  # type: ignore[union-attr]

    def _counts(self) -> Counts:
        total: StatsEntry = self.runner.stats.total  # type: ignore[union-attr]
        times_ms = Counter(total.response_times)
        return Counts(self.get_run_time(), total.num_requests, total.num_failures, times_ms)

    def _say(self, users: int) -> None:
        if self._before is None:
            return
        now, before = self._counts(), self._before
        requests, times_ms = now.requests - before.requests, now.times_ms - before.times_ms
        p50, p99 = (
            calculate_response_time_percentile(times_ms, requests, part) for part in (0.5, 0.99)
        )
        logging.info(
            "step of %d users: %.1f requests/s, %.1f failures/s, p50 %s ms, p99 %s ms",
            users,
            requests / (now.at_s - before.at_s),
            (now.failures - before.failures) / (now.at_s - before.at_s),
            p50,
            p99,
        )


def _what_is_wrong(options: Any) -> str | None:
    if options.step_users < 1:
        return f"--step-users: {options.step_users} is less than 1"
    if options.steps < 1:
        return f"--steps: {options.steps} is less than 1"
    if not options.step_s >= STEP_S_MIN:
        return f"--step-s: {options.step_s} is less than {STEP_S_MIN}"
    return None
