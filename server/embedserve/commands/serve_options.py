"""Options of `embedserve serve` and `cluster`, made of the fields of their settings. Those of
`serve`, in config.py, are flags, EMBEDSERVE_* variables and keys of the TOML file. This module
reads that file and sets nothing itself."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from embedserve.commands.store_commands import store_argument
from embedserve.config import Limits, ServeSettings
from embedserve.processes.cluster_settings import ClusterSettings

REPEATABLE = tuple(
    name for name, kind in get_type_hints(ServeSettings).items() if kind == tuple[str, ...]
)
"""Settings that may be repeated: typer passes a list of them, or None."""
_TOML_KINDS: Mapping[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool, str)),
    int: ("a number", (int, float, str)),
    float: ("a number", (int, float, str)),
    str: ("a string", (str,)),
}
"""By kind of setting, what its key of the TOML file is to have, and the types that are accepted. A
string is parsed as on the command line."""


def with_options(
    command: Callable[..., None], options: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Returns ``command``, which takes arbitrary keyword arguments, with the signature that typer
    reads."""
    parameters = list(options)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def serve_options() -> Iterator[inspect.Parameter]:
    """Yields the arguments and options of `serve`: store, config, and the fields of settings and
    limits."""
    store = store_argument(
        "Model store: a folder, or a URL such as s3://bucket/store.", "EMBEDSERVE_STORE"
    )
    yield _parameter("store", str, store)
    config = typer.Option(
        callback=_read_config,
        is_eager=True,
        envvar="EMBEDSERVE_CONFIG",
        help="TOML file with settings; their keys are the flags with '_' in place of '-'.",
    )
    yield _parameter("config", Path | None, config, None)
    yield from _options(ServeSettings, _serve_arguments)
    yield from _options(Limits, _serve_arguments, rich_help_panel="Limits")


def _serve_arguments(setting: Field[Any]) -> dict[str, Any]:
    callback = _check_not_empty if setting.default == "" else None
    return {"callback": callback, "envvar": f"EMBEDSERVE_{setting.name.upper()}"}


def cluster_options() -> Iterator[inspect.Parameter]:
    """Yields the arguments and options of `cluster`."""
    yield _parameter("store", str, store_argument("Model store: a folder or a URL."))
    callbacks = {"router_config": check_config}
    yield from _options(ClusterSettings, lambda one: {"callback": callbacks.get(one.name)})


def _options(
    settings: type[Any], arguments: Callable[[Field[Any]], dict[str, Any]], **common: Any
) -> Iterator[inspect.Parameter]:
    """Yields an option for each field of ``settings`` with a help text.

    Args:
        arguments: returns the arguments of typer.Option that one field needs.
        common: arguments of typer.Option for all fields.
    """
    kinds = get_type_hints(settings)
    for one in fields(settings):
        if "help" in one.metadata:
            more = arguments(one) | common | {"metavar": "" if kinds[one.name] is bool else None}
            is_many = kinds[one.name] == tuple[str, ...]
            kind = list[str] | None if is_many else kinds[one.name]
            option = typer.Option(**one.metadata, **more)
            yield _parameter(one.name, kind, option, None if is_many else one.default)


def _parameter(
    name: str, kind: Any, described: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, described],
    )


def _check_not_empty(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Rejects an empty flag, as for an unset variable in a script: the server would start without
    tokens or TLS."""
    source = ctx.get_parameter_source(param.name or "")
    if not value and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("it is empty: leave it out, or is a variable unset?")
    return value


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Uses the keys of the TOML file as defaults; flags and EMBEDSERVE_* variables override
    them."""
    if path is not None:
        ctx.default_map = {**(ctx.default_map or {}), **_config_values(path)}
    return path


def check_config(path: str) -> str:
    """Returns ``path``, which names a TOML file of settings, or "" for none."""
    if path:
        _config_values(Path(path))
    return path


def _config_values(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    known = {f.name for f in (*fields(ServeSettings), *fields(Limits))} - {"limits"}
    for key in values:
        if key not in known:
            near = "".join(f", did you mean {one}?" for one in get_close_matches(key, known, 1))
            raise typer.BadParameter(f"{path}: unknown key {key!r}{near}")
        if expected := _expected_kind(key, values[key]):
            raise typer.BadParameter(f"{path}: {key} is {values[key]!r}, expected {expected}")
    return values


def _expected_kind(key: str, value: object) -> str:
    """Returns what key ``key`` of the TOML file is to have; "" if ``value`` is of that kind."""
    if key in REPEATABLE:
        is_strings = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return "" if is_strings else "a list of strings"
    kind = (get_type_hints(ServeSettings) | get_type_hints(Limits))[key]
    words, types = _TOML_KINDS[kind]
    is_right = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
    if isinstance(value, str) and kind in (int, float):
        is_right = _is_number(value)
    return "" if is_right else words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
