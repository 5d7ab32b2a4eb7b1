"""Tests of the EMBEDSERVE_* variables of deployments: each is a setting of the command."""

import dataclasses

from embedserve.config import Limits, ServeSettings

from .conftest import Rendered

KNOWN = {
    f"EMBEDSERVE_{field.name.upper()}"
    for settings in (ServeSettings, Limits)
    for field in dataclasses.fields(settings)
}


def test_rendered_variables_are_known_settings(rendered: Rendered) -> None:
    assert set(rendered.variables) - KNOWN == set()


def test_variables_of_the_image_are_known_settings(dockerfile: list[list[str]]) -> None:
    words = [word for line in dockerfile if line[0] == "ENV" for word in line[1:]]
    names = {word.split("=")[0] for word in words if word.startswith("EMBEDSERVE_")}
    assert names == {"EMBEDSERVE_HOST"}
    assert names <= KNOWN
