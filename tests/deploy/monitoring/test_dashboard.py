"""Tests of the dashboard's file: Grafana can import it, and it names no installation's source."""

import json
import re
from collections.abc import Iterator
from typing import Any

from documents import ROOT

DASHBOARD = json.loads((ROOT / "deploy/monitoring/grafana/dashboard.json").read_text("utf-8"))
UID = r"[A-Za-z0-9_-]{1,40}"
"""Pattern of the dashboard identifiers that Grafana accepts."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def queries() -> Iterator[dict[str, Any]]:
    """Yields all queries of data sources: panels and their targets, variables, annotations."""
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            yield panel
            yield from panel["targets"]
    yield from (one for one in DASHBOARD["templating"]["list"] if one["type"] == "query")
    yield from DASHBOARD["annotations"]["list"]


def test_the_dashboard_has_an_identifier_and_a_version() -> None:
    assert re.fullmatch(UID, DASHBOARD["uid"])
    assert DASHBOARD["version"] >= 1
    assert DASHBOARD["schemaVersion"] >= 36  # from there a data source is an object
    assert "id" not in DASHBOARD  # the id of a row in one installation's database
    assert "__inputs" not in DASHBOARD  # only a browser's import fills it in


def test_the_data_source_is_a_variable_that_comes_first() -> None:
    first, *others = DASHBOARD["templating"]["list"]
    assert (first["name"], first["type"], first["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    assert "datasource" not in {one["type"] for one in others}


def test_every_query_uses_the_data_source_variable() -> None:
    all_queries = list(queries())
    assert len(all_queries) > 50
    for one in all_queries:
        assert one["datasource"] == SOURCE, one.get("title") or one.get("name") or one.get("expr")
