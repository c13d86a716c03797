# SPDX-License-Identifier: Apache-2.0
"""Convert configuration dataclasses to command line options, and configurations to command line arguments."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import typer

from mizzen.common.extras import describe_missing_module
from mizzen.common.options import flag

METAVARS = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT"}
"""Placeholder for an option's value in the help text, by the type of the value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Description of a configuration field, from which a command line option is built."""

    name: str
    kind: Any
    """Type of the option's value, without `None`; `list[str]` for a repeatable option."""
    optional: bool
    default: Any
    """Default value of the option; `...` if the option is required."""
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None


def settings(config: type) -> list[Setting]:
    """Return a setting for each field of a dataclass that declares its fields with
    `mizzen.common.options`."""
    hints = typing.get_type_hints(config)
    result = []
    for field in dataclasses.fields(config):
        kind, optional = _without_none(hints[field.name])
        required = field.default is dataclasses.MISSING
        result.append(
            Setting(
                name=field.name,
                kind=kind,
                optional=optional,
                default=... if required else field.default,
                **{key: field.metadata[key] for key in ("help", "choices", "low", "high")},
            )
        )
    return result


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return a type hint after removing `None` and replacing a tuple by a list.

    Also returns whether the original hint allowed `None`.
    """
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        (hint,) = [part for part in typing.get_args(hint) if part is not type(None)]
    if typing.get_origin(hint) is tuple:
        hint = list[typing.get_args(hint)[0]]
    return hint, optional


def parameter(setting: Setting) -> inspect.Parameter:
    """Return the parameter from which typer builds the option of a setting."""
    name = flag(setting.name)
    default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    info = typer.Option(
        default,
        f"{name}/--no-{name[2:]}" if setting.kind is bool else name,
        help=setting.help,
        min=setting.low,
        max=setting.high,
        metavar=None if setting.kind is bool or setting.choices else METAVARS[setting.kind],
    )
    kind = Literal[setting.choices] if setting.choices else setting.kind
    annotation = typing.Optional[kind] if setting.optional else kind  # noqa: UP045 - `kind` is a value here
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation
    )


def command(run: Callable[..., None], offered: Iterable[Setting], *, extras: str = "") -> Callable[..., None]:
    """Return a typer command that calls `run` and has an option for each setting in `offered`.

    `run` receives the values of these options as keyword arguments; values of repeatable options are tuples.

    Args:
        run: function that does the work; its name is the command's name after an underscore.
        offered: settings that are options of the command.
        extras: extras of the distribution that the command needs, separated by commas. If a package is not
            installed, the command names them and exits with code 1.
    """
    own = inspect.signature(run, eval_str=True).parameters.values()
    parameters = [p for p in own if p.kind is not p.VAR_KEYWORD] + [parameter(s) for s in offered]

    def call(**values: Any) -> None:
        try:
            run(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
        except ModuleNotFoundError as error:
            program = f"mizzen {run.__name__.removeprefix('_')}"
            print(f"mizzen: {describe_missing_module(error, program, extras)}", file=sys.stderr)
            raise typer.Exit(1) from None

    call.__name__ = run.__name__
    call.__doc__ = run.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def build(config: type, values: Mapping[str, Any]) -> Any:
    """Return an instance of a configuration dataclass with the given values.

    Raises:
        typer.BadParameter: the configuration rejects a value with a ValueError, whose message is used.
    """
    try:
        return config(**values)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def arguments(config: Any) -> list[str]:
    """Return the command line arguments that produce a configuration; default values are omitted."""
    result = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), flag(field.name)
        if value == field.default:
            continue
        if isinstance(value, bool):
            result.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, tuple):
            result += [f"{name}={item}" for item in value]
        else:
            result.append(f"{name}={value}")
    return result
