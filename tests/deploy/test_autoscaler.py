"""Tests of the autoscaler: its target exists, and prometheus-adapter's rules make its metrics."""

from __future__ import annotations

from typing import Any

import yaml

from .conftest import DEPLOY, Rendered, kustomize_text, manifests_of

RULES = yaml.safe_load((DEPLOY / "monitoring" / "adapter-rules.yaml").read_text())["rules"]


def scaled(rendered: Rendered) -> dict[str, Any]:
    spec: dict[str, Any] = rendered.one("HorizontalPodAutoscaler")["spec"]
    return spec


def test_it_scales_the_deployment(rendered: Rendered) -> None:
    deployment = rendered.one("Deployment")
    target = scaled(rendered)["scaleTargetRef"]
    assert target == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }


def test_its_metrics_are_the_adapters(rendered: Rendered) -> None:
    metrics = [one["pods"]["metric"]["name"] for one in scaled(rendered)["metrics"]]
    assert metrics == [rule["name"]["as"] for rule in RULES]


def test_the_readmes_patch_replaces_them() -> None:
    """Checks that the target can be reached: a worker uses at most one core.

    A share that it never reaches would never add a pod.
    """
    _, _, section = (DEPLOY / "README.md").read_text().partition("\n## Autoscaling\n")
    patches = yaml.safe_load(section.split("```yaml\n")[1].split("```")[0])
    kustomization = {"resources": ["KUBERNETES/overlays/cpu"], "patches": patches}
    ours = Rendered("ours", manifests_of(kustomize_text(yaml.safe_dump(kustomization))))
    (metric,) = scaled(ours)["metrics"]
    assert metric["resource"]["name"] == "cpu"
    share = metric["resource"]["target"]["averageUtilization"] / 100
    workers = ours.settings.workers
    assert share * int(ours.container["resources"]["requests"]["cpu"]) < workers


def test_the_adapters_rules_are_of_pods() -> None:
    for rule in RULES:
        assert set(rule) == {"seriesQuery", "resources", "name", "metricsQuery"}
        labels = {name: to["resource"] for name, to in rule["resources"]["overrides"].items()}
        assert labels == {"namespace": "namespace", "pod": "pod"}
        for part in ("<<.Series>>", "<<.LabelMatchers>>", "<<.GroupBy>>"):
            assert part in rule["metricsQuery"]


def test_pods_come_soon_and_go_one_by_one(cpu: Rendered) -> None:
    behavior = scaled(cpu)["behavior"]
    up, down = behavior["scaleUp"], behavior["scaleDown"]
    assert up["stabilizationWindowSeconds"] < down["stabilizationWindowSeconds"]
    (policy,) = down["policies"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)
