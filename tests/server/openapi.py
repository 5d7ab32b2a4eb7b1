"""Checks documents against the schemas of the OpenAPI description."""

from typing import Any

import jsonschema


def validate(document: Any, name: str, described: dict[str, Any]) -> None:
    """Checks that ``document`` matches the schema ``name``."""
    reference = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    jsonschema.validate(document, reference, cls=jsonschema.Draft202012Validator)
