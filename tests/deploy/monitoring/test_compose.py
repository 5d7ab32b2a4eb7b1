"""Tests of compose.yaml: it fits the neighbouring files, the image and the server.

The tests do not call Docker, because their hosts have no engine.
"""

import json
from pathlib import Path
from typing import Any

import yaml
from documents import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
GRAFANA = MONITORING / "grafana"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def compose() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = read(MONITORING / "compose.yaml")["services"]
    return services


def mounted(service: str) -> dict[str, str]:
    """Returns the mounts of a service's container: path inside to path outside."""
    pairs = [volume.split(":")[:2] for volume in compose()[service]["volumes"]]
    return {inside: outside for outside, inside in pairs}


def test_mounted_files_exist_and_volumes_are_declared() -> None:
    volumes = read(MONITORING / "compose.yaml")["volumes"]
    for name in compose():
        for outside in mounted(name).values():
            assert outside in volumes or (MONITORING / outside).is_file(), outside


def test_image_is_built_like_the_kubernetes_image() -> None:
    (image,) = read(ROOT / "deploy/kubernetes/base/kustomization.yaml")["images"]
    services = compose()
    for name in ("demo", "embedserve"):
        assert services[name]["image"] == f"{image['name']}:{image['newTag']}"
    build = services["demo"]["build"]
    assert (MONITORING / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert image["newTag"].endswith(build["args"]["VARIANT"])


def test_prometheus_scrapes_the_server_and_loads_the_mounted_rules() -> None:
    config = read(MONITORING / "prometheus.yaml")
    ((target,),) = [one["targets"] for one in config["scrape_configs"][0]["static_configs"]]
    name, _, port = target.partition(":")
    assert f"127.0.0.1:{port}:{port}" in compose()[name]["ports"]
    inside = mounted("prometheus")
    assert (MONITORING / inside["/etc/prometheus/prometheus.yml"]).name == "prometheus.yaml"
    assert [f"/etc/prometheus/{rules}" for rules in config["rule_files"]] == [
        path for path in inside if path.endswith("rules.yaml")
    ]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = read(GRAFANA / "datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in compose()["prometheus"]["ports"]
    (provider,) = read(GRAFANA / "provider.yaml")["providers"]
    home = compose()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert mounted("grafana")[home] == "./grafana/dashboard.json"


def test_ports_are_published_only_on_localhost() -> None:
    ports = [port for service in compose().values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_dashboard_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = json.loads((GRAFANA / "dashboard.json").read_text())["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(set(numbers)) == len(numbers)
    occupied: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & occupied, panel["title"]
        occupied |= cells
