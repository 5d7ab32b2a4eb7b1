"""Tests of the autoscaler: its target exists, and prometheus-adapter's rules make its metrics."""

from typing import Any

import yaml

from .conftest import DEPLOY, Rendered, kustomize_text, manifests_of, readme_yaml

RULES = yaml.safe_load((DEPLOY / "monitoring" / "adapter-rules.yaml").read_text())["rules"]


def autoscaler_spec(rendered: Rendered) -> dict[str, Any]:
    spec: dict[str, Any] = rendered.one("HorizontalPodAutoscaler")["spec"]
    return spec


def test_autoscaler_targets_the_deployment(rendered: Rendered) -> None:
    deployment = rendered.one("Deployment")
    target = autoscaler_spec(rendered)["scaleTargetRef"]
    assert target == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }


def test_autoscaler_metrics_are_those_of_the_adapter_rules(rendered: Rendered) -> None:
    metrics = [one["pods"]["metric"]["name"] for one in autoscaler_spec(rendered)["metrics"]]
    assert metrics == [rule["name"]["as"] for rule in RULES]


def test_readme_patch_scales_by_a_reachable_cpu_share() -> None:
    """Checks that the target can be reached: a worker uses at most one core.

    A share that it never reaches would never add a pod.
    """
    patches = yaml.safe_load(readme_yaml("## Autoscaling"))
    kustomization = {"resources": ["KUBERNETES/overlays/cpu"], "patches": patches}
    ours = Rendered("ours", manifests_of(kustomize_text(yaml.safe_dump(kustomization))))
    (metric,) = autoscaler_spec(ours)["metrics"]
    assert metric["resource"]["name"] == "cpu"
    share = metric["resource"]["target"]["averageUtilization"] / 100
    workers = ours.settings.workers
    assert share * int(ours.container["resources"]["requests"]["cpu"]) < workers


def test_adapter_rules_map_metrics_to_pods() -> None:
    for rule in RULES:
        assert set(rule) == {"seriesQuery", "resources", "name", "metricsQuery"}
        labels = {name: to["resource"] for name, to in rule["resources"]["overrides"].items()}
        assert labels == {"namespace": "namespace", "pod": "pod"}
        for part in ("<<.Series>>", "<<.LabelMatchers>>", "<<.GroupBy>>"):
            assert part in rule["metricsQuery"]


def test_scaling_down_is_slower_and_removes_one_pod_at_a_time(cpu: Rendered) -> None:
    behavior = autoscaler_spec(cpu)["behavior"]
    up, down = behavior["scaleUp"], behavior["scaleDown"]
    assert up["stabilizationWindowSeconds"] < down["stabilizationWindowSeconds"]
    (policy,) = down["policies"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)
