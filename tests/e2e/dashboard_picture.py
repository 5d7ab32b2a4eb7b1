"""Draws the panels of Grafana's dashboard from what a real Prometheus scraped of a real server.

    python -m e2e.dashboard_picture dashboard.png --seconds 60

The tests do not install Grafana. matplotlib (installed by make bench) draws the panels at the
positions of dashboard.json, with their units and stacking.
"""

import argparse
import math
import random
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from e2e.demo_server import Demo, make_demo
from e2e.test_monitoring import DASHBOARD, VARIABLES, make_token, scraping_prometheus
from running_servers import run_command, running

from embedserve_client import EmbedClient, EmbedServeClientError, GrpcEmbedClient
from embedserve_store.terminal.sizes import human_bytes

COLUMNS = 24
"""Width of Grafana's grid, in columns."""
RATES_S = 25
"""Seconds before the first sample is drawn: rates are computed over the preceding 20 s."""
PAUSE_S = 0.005
UNKNOWN = 0.02
WRONG = 0.005
Curve = tuple[list[float], list[float]]
"""Times and values of a curve."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the dashboard's panels.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo(folder)
        token = make_token(folder / "tokens")
        options = ("--workers", 2, "--follow", "latest", "--tokens", folder / "tokens")
        with (
            running(folder / "store", folder / "log", *options) as server,
            scraping_prometheus(folder, server.http.removeprefix("http://"), token) as prometheus,
            sending_requests(Demo(folder, server), token),
        ):
            time.sleep(RATES_S)
            start_s = time.time()
            time.sleep(arguments.seconds / 2)
            run_command("demo", folder / "store")  # publishes the next version
            time.sleep(arguments.seconds / 2)
            draw(arguments.output, prometheus, start_s, time.time())


@contextmanager
def sending_requests(demo: Demo, token: str) -> Iterator[None]:
    """Sends requests over REST and gRPC inside the context, some with unknown ids, some invalid."""
    ids = {
        key: [int(line) for line in (demo.folder / f"demo.{key}.txt").read_text().split()]
        for key in ("user", "movie")
    }
    stop = threading.Event()

    def send_requests(seed: int, client: EmbedClient | GrpcEmbedClient) -> None:
        chance = random.Random(seed)
        with client:
            while not stop.wait(PAUSE_S):
                user = 1 if chance.random() < UNKNOWN else chance.choice(ids["user"])
                history = chance.choices(ids["movie"], k=chance.randint(1, 30))
                model = "none" if chance.random() < WRONG else None
                try:
                    client.embed({"user": [[user]], "history": [history]}, model=model)
                except EmbedServeClientError:  # expected for the invalid requests
                    if model is None:
                        raise

    clients = (
        EmbedClient(demo.server.http, token=token),
        GrpcEmbedClient(demo.server.grpc, token=token),
    )
    threads = [threading.Thread(target=send_requests, args=one) for one in enumerate(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def draw(path: Path, prometheus: httpx.Client, start_s: float, end_s: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = DASHBOARD["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(16, 0.34 * height), facecolor="white")
    for panel in panels:
        at = panel["gridPos"]
        left, width = at["x"] / COLUMNS, at["w"] / COLUMNS
        top, tall = 1 - at["y"] / height, at["h"] / height
        title = {"fontsize": 9, "va": "top", "fontweight": "bold"}
        figure.text(left + 0.005, top - 0.004, panel["title"], **title)
        if panel["type"] == "row":
            continue
        box = (left + 0.045, top - tall + 0.3 * tall, width - 0.06, 0.52 * tall)
        axis = figure.add_axes(box)
        curves = curves_of(panel, prometheus, start_s, end_s)
        show = show_last if panel["type"] == "stat" else show_curves
        show(axis, panel, curves)
    figure.savefig(path, dpi=70)
    print(f"picture: {path}")


def curves_of(
    panel: dict[str, Any], prometheus: httpx.Client, start_s: float, end_s: float
) -> dict[str, Curve]:
    """Returns the curves of a panel by their names in the legend."""
    curves: dict[str, Curve] = {}
    for target in panel["targets"]:
        query = target["expr"]
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        parameters = {"query": query, "start": start_s, "end": end_s, "step": 1}
        answer = prometheus.get("query_range", params=parameters).json()
        assert answer["status"] == "success", answer
        for series in answer["data"]["result"]:
            labels = defaultdict(str, series["metric"])
            name = re.sub(r"{{(\w+)}}", r"{\1}", target["legendFormat"])
            times, values = zip(*series["values"], strict=True)
            seconds = [at - start_s for at in times]
            curves[name.format_map(labels)] = seconds, [float(value) for value in values]
    return curves


def show_last(axis: Any, panel: dict[str, Any], curves: dict[str, Curve]) -> None:
    axis.axis("off")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    last = [format_value(values[-1], unit) for _, values in curves.values()]
    axis.text(0.4, 0.3, ", ".join(last) or "No data", fontsize=18, ha="center")


def show_curves(axis: Any, panel: dict[str, Any], curves: dict[str, Curve]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    stacking = defaults.get("custom", {}).get("stacking", {}).get("mode", "none")
    below: dict[float, float] = {}
    for name, (times, values) in curves.items():
        if stacking == "normal":
            bottom = [below.get(at, 0.0) for at in times]
            values = [a + b for a, b in zip(values, bottom, strict=True)]
            below |= dict(zip(times, values, strict=True))
            axis.fill_between(times, bottom, values, alpha=0.3)
        axis.plot(times, values, label=name, linewidth=1)
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
    axis.yaxis.set_major_formatter(lambda value, _: format_value(value, defaults["unit"]))
    place = {"loc": "upper left", "bbox_to_anchor": (-0.1, -0.14), "ncol": 2}
    axis.legend(fontsize=6, frameon=False, **place)


def format_value(value: float, unit: str) -> str:
    """Returns a figure nearly as Grafana formats it."""
    if math.isnan(value):
        return "NaN"
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit in ("bytes", "Bps"):
        return human_bytes(round(value)) + ("/s" if unit == "Bps" else "")
    if unit == "s":
        return f"{1e6 * value:.3g} µs" if value < 1e-3 else f"{1e3 * value:.3g} ms"
    return f"{value:,.4g}" + {"reqps": " req/s", "cps": " c/s"}.get(unit, "")


if __name__ == "__main__":
    main()
