"""The engine's options as the GPU benchmarks are told them, settled once for engine, limits and titles."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from arguments import given

from mizzen.engine.config import EngineOptions

ELSEWHERE = {"device": "--device", "model": "--shape"}
"""Options of the engine that a benchmark needs to know before: each has a flag alone."""
VARIANTS: dict[str, dict[str, Any]] = {
    "all on": {},
    "graphs off": {"cuda_graph": "off"},
    "overlap off": {"steps_in_flight": 1},
    "prefix cache off": {"prefix_cache": "none"},
    "fusion off": {"fusion": "off"},
}
"""What `--ablate` measures, by what each changes."""
ON_GPUS = ("graphs off", "fusion off")
"""Variants that change nothing on a CPU, which has neither."""
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def kind_of(name: str) -> type:
    """Return the type of an engine option's values; that of None is left out."""
    kind = typing.get_type_hints(EngineOptions)[name]
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def accepted(kind: type, rules: Mapping[str, Any]) -> str:
    """Say which values an engine option takes."""
    if rules["choices"]:
        return f"one of {', '.join(rules['choices'])}"
    bounds = [
        f"{word} {rules[end]}" for end, word in (("low", "from"), ("high", "to")) if rules[end] is not None
    ]
    return " ".join([KINDS[kind], *bounds])


def value_of(kind: type, text: str) -> Any:
    """Read a value.

    Raises:
        ValueError: it is none of this kind.
    """
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    return kind(text)


def engine_option(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, an option of the engine."""
    name, _, given = text.partition("=")
    name = name.replace("-", "_")
    rules = {field.name: field.metadata for field in dataclasses.fields(EngineOptions)}
    if name not in rules or not given:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE of an engine option")
    if name in ELSEWHERE:
        raise argparse.ArgumentTypeError(f"{text!r} is chosen by {ELSEWHERE[name]} alone")
    kind, rule = kind_of(name), rules[name]
    try:
        value = value_of(kind, given)
        low, high = rule["low"], rule["high"]
        if rule["choices"] and value not in rule["choices"]:
            raise ValueError
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {name} must be {accepted(kind, rule)}") from None
    return name, value


@dataclasses.dataclass(frozen=True, slots=True)
class Flagged:
    """How flags tell an option of the engine."""

    flags: tuple[str, ...]
    value: Callable[[argparse.Namespace], Any]
    """Reads it from them; None leaves the option to the engine."""


def flag(name: str) -> Flagged:
    """Return an option whose value is that of a flag."""
    return Flagged((name,), lambda args: getattr(args, name))


def switch(name: str, on: str, off: str) -> Flagged:
    """Return an option with one value where a flag is given, and another where it is not."""
    return Flagged((name,), lambda args: on if getattr(args, name) else off)


FLAGGED = {
    "tensor": flag("tensor"),
    "page_size": flag("page_size"),
    "attention_prefill": flag("attention"),
    "attention_decode": flag("attention_decode"),
    "kv_cache_dtype": flag("kv_cache_dtype"),
    "prefill_chunk_tokens": flag("chunk"),
    "steps_in_flight": Flagged(("depth", "no_overlap"), lambda args: 1 if args.no_overlap else args.depth),
    "cuda_graph": switch("no_graphs", "off", "auto"),
    "fusion": switch("no_fusion", "off", "auto"),
    "prefix_cache": switch("no_prefix_cache", "none", "radix"),
}
"""Options of the engine that have flags of their own."""


def smoke(args: argparse.Namespace) -> bool:
    """Tell whether a run only tells whether all works."""
    return args.device == "cpu" and args.shape == "tiny"


def flagged(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the engine that flags tell."""
    values = {name: option.value(args) for name, option in FLAGGED.items()}
    return {name: value for name, value in values.items() if value is not None}


def engine_options(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return the chosen options of the engine: a benchmark's own are `more`, and `--engine` is above all.

    Whatever asks for an option has to ask here, so that limits and titles are those of what runs.
    """
    # Products of the tiny shape are too short to share: threads would only wait for one another.
    alone = {"threads": 1} if smoke(args) else {}
    return {"skip_tokenizer": True} | alone | flagged(args) | more | dict(args.engine)


def varied(args: argparse.Namespace, variant: str) -> argparse.Namespace:
    """Return the options of a variant, whatever `--engine` says."""
    return argparse.Namespace(**vars(args) | {"engine": [*args.engine, *VARIANTS[variant].items()]})


def off_already(args: argparse.Namespace) -> list[str]:
    """Return the variants that the chosen options are without `--ablate`."""
    options = engine_options(args)
    return [name for name, change in VARIANTS.items() if change and change.items() <= options.items()]


def read(made: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """Read the command line; `small` are defaults where a run only tells whether all works."""
    args = made.parse_args()
    if not smoke(args):
        return args
    made.set_defaults(**small)
    return made.parse_args()


def contradiction(args: argparse.Namespace, told: set[str], own: Mapping[str, str]) -> str | None:
    """Return what is wrong where the command line says different things of one option of the engine.

    Args:
        args: the command line.
        told: names of the options that it gives; the others are defaults, which `--engine` goes before.
        own: options of the engine by the names of a benchmark's own options.
    """
    if args.no_overlap and "depth" in told and args.depth != 1:
        return f"--no-overlap is --depth 1, not {args.depth}: leave one of them out"
    flags = flagged(args) | {option: getattr(args, name) for name, option in own.items()}
    names = {option: told_by.flags for option, told_by in FLAGGED.items()}
    names |= {option: (name,) for name, option in own.items()}
    for name, count in Counter(name for name, _ in args.engine).items():
        if count > 1:
            return f"--engine {name} is given {count} times: leave one value"
    for name, value in args.engine:
        if told & {*names.get(name, ())} and flags[name] != value:
            return f"--engine {name}={value}: a flag says {flags[name]}: leave one of them out"
    return None


def parsed(
    made: argparse.ArgumentParser, own: Mapping[str, str] | None = None, /, **small: Any
) -> argparse.Namespace:
    """Read the command line like `read`, and refuse options that contradict one another.

    `own` are options of the engine by the names of a benchmark's own options.
    """
    args = read(made, **small)
    if wrong := contradiction(args, given(made), own or {}):
        made.error(wrong)
    return args
