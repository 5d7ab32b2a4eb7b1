"""Tests of other projects' resources against these projects' own schemas.

EMBEDSERVE_CRDS names a folder with their CustomResourceDefinitions as YAML: KServe's
config/crd/full/serving.kserve.io_{servingruntimes,inferenceservices}.yaml and the Prometheus
Operator's monitoring.coreos.com_{servicemonitors,prometheusrules}.yaml. Without it the tests are
skipped. The files are other projects' code, so they are not kept here.
"""

import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from .conftest import Rendered
from .parts_overlay import render_parts

OPERATORS = {"ServiceMonitor", "PrometheusRule"}
KINDS = {"ServingRuntime", "InferenceService", *OPERATORS}
Schemas = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    """Returns the schemas by apiVersion and kind."""
    folder = os.environ.get("EMBEDSERVE_CRDS")
    if not folder:
        pytest.skip("EMBEDSERVE_CRDS names no folder with the schemas of KServe and Prometheus")
    found: Schemas = {}
    for path in Path(folder).glob("*.yaml"):
        for one in yaml.safe_load_all(path.read_text()):
            if one and one["kind"] == "CustomResourceDefinition":
                group, kind = one["spec"]["group"], one["spec"]["names"]["kind"]
                for version in one["spec"]["versions"]:
                    schema = strict_schema(version["schema"]["openAPIV3Schema"])
                    found[f"{group}/{version['name']}", kind] = schema
    return found


def strict_schema(schema: Any, *, is_root: bool = True) -> Any:
    """Returns the schema with every unknown field as an error."""
    if isinstance(schema, list):
        return [strict_schema(one, is_root=False) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict_schema(value, is_root=False) for name, value in schema.items()}
    if "(?i)" in str(made.get("pattern")):
        del made["pattern"]  # Go's syntax, not Python's
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or is_root
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not keeps:
        # The resource's own "metadata" is Kubernetes', and has no fields here.
        made.setdefault("additionalProperties", False)
    return made


def check(schemas: Schemas, rendered: Rendered) -> set[str]:
    """Validates the resources of other projects, and returns their kinds."""
    custom = [one for one in rendered.manifests if one["kind"] in KINDS]
    for one in custom:
        schema = schemas[one["apiVersion"], one["kind"]]
        jsonschema.Draft202012Validator(schema).validate(one)
    return {one["kind"] for one in custom}


def test_kserve_resources_match_their_schemas(schemas: Schemas, kserve: Rendered) -> None:
    assert check(schemas, kserve) == {"ServingRuntime", "InferenceService"}


def test_prometheus_operator_resources_match_their_schemas(
    schemas: Schemas, rendered: Rendered
) -> None:
    is_scraped = "monitoring" in rendered.components and rendered.is_reachable
    assert check(schemas, rendered) == (OPERATORS if is_scraped else set())


def test_prometheus_operator_resources_of_parts_match_their_schemas(schemas: Schemas) -> None:
    assert check(schemas, render_parts(2, "monitoring")) == OPERATORS


def test_unknown_field_is_rejected_by_the_schema(schemas: Schemas, kserve: Rendered) -> None:
    runtime = kserve.one("ServingRuntime")
    wrong = {**runtime, "spec": {**runtime["spec"], "terminationGracePeriodSeconds": 30}}
    schema = schemas[wrong["apiVersion"], "ServingRuntime"]
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriodSeconds"):
        jsonschema.Draft202012Validator(schema).validate(wrong)
