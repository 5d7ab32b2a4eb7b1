"""Tests of Prometheus' rules: valid, each alert fires only for its fault, and has its page."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from documents import ROOT, anchors

from embedserve.metrics.families import FAMILIES

MONITORING = ROOT / "deploy" / "monitoring"
RULES = MONITORING / "rules.yaml"
RULES_TESTS = [Path(__file__).with_name(f"{name}_test.yaml") for name in ("rules", "days_rules")]
ALERTS_PAGE = ROOT / "docs" / "alerts.md"

SUFFIX = re.compile("_(total|bucket|sum|count)$")
OF_SCRAPES = {"job", "instance", "le"}
"""Labels that Prometheus adds to series, and the one of buckets."""


def promtool(*arguments: object) -> str:
    """Runs promtool, which must succeed, and returns its output."""
    command = ["promtool", *map(str, arguments)]
    # Go's default collects garbage more often, which takes a sixth of the CPU time.
    environment = os.environ | {"GOGC": "400"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loaded(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.CSafeLoader)


def alerts() -> dict[str, dict[str, Any]]:
    groups = loaded(RULES)["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", RULES)
    promtool("check", "config", MONITORING / "prometheus.yaml")


def test_promtool_tests_of_the_alerts_pass() -> None:
    promtool("test", "rules", *RULES_TESTS)


def test_series_in_tests_have_the_labels_of_their_families() -> None:
    labels_of = {family.name: set(family.labels) for family in FAMILIES}
    for series in {
        one["series"]
        for path in RULES_TESTS
        for test in loaded(path)["tests"]
        for one in test["input_series"]
    }:
        name, _, labels = series.partition("{")
        if name != "up":
            found = set(re.findall(r'(\w+)="', labels)) - OF_SCRAPES
            assert found == labels_of[SUFFIX.sub("", name)], series


def test_every_alert_is_tested_both_firing_and_silent() -> None:
    well, *ill = (test for one in RULES_TESTS for test in loaded(one)["tests"])
    assert [one["alertname"] for one in well["alert_rule_test"]] == list(alerts())
    raised = [one["alertname"] for test in ill for one in test["alert_rule_test"][-1:]]
    assert sorted(raised) == sorted(alerts())
    assert all(test["alert_rule_test"][-1]["exp_alerts"] for test in ill)


def test_each_alert_has_its_heading_on_the_page() -> None:
    headings = re.findall(r"^## (\w+)$", ALERTS_PAGE.read_text(), flags=re.MULTILINE)
    assert headings == list(alerts())
    for rule in alerts().values():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / page == ALERTS_PAGE
        assert anchor in anchors(ALERTS_PAGE)
