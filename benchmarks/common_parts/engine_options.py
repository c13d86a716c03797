# SPDX-License-Identifier: Apache-2.0
"""Engine options of the GPU benchmarks: parsing, checks, and one function that computes their values."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from common_parts.arguments import given_options
from mizzen.engine.config import EngineOptions

FLAG_ONLY_OPTIONS = {"device": "--device", "model": "--shape"}
"""For each engine option that `--engine` cannot set, the benchmark's own flag that sets it."""
VARIANTS: dict[str, dict[str, Any]] = {
    "all on": {},
    "graphs off": {"cuda_graph": "off"},
    "overlap off": {"steps_in_flight": 1},
    "prefix cache off": {"prefix_cache": "none"},
    "fusion off": {"fusion": "off"},
}
"""For each variant of `--ablate`, the engine options that it changes, with their values."""
GPU_ONLY_VARIANTS = ("graphs off", "fusion off")
"""Variants that have no effect on a CPU, where there are neither graphs nor fused kernels."""
KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def kind_of(name: str) -> type:
    """Return the type of an engine option; for an option of type `T | None`, return T."""
    kind = typing.get_type_hints(EngineOptions)[name]
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def describe_values(kind: type, rules: Mapping[str, Any]) -> str:
    """Return a description of the values that an engine option accepts.

    `kind` is the type of the option; `rules` contains its valid choices or bounds.
    """
    if rules["choices"]:
        return f"one of {', '.join(rules['choices'])}"
    bounds = [
        f"{word} {rules[end]}" for end, word in (("low", "from"), ("high", "to")) if rules[end] is not None
    ]
    return " ".join([KINDS[kind], *bounds])


def parse_value(kind: type, text: str) -> Any:
    """Parse a value of the given type.

    Raises:
        ValueError: the text is not of this type.
    """
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    return kind(text)


def engine_option(text: str) -> tuple[str, Any]:
    """Parse an engine option of the form NAME=VALUE.

    Raises:
        argparse.ArgumentTypeError: name or value is invalid; the message says which values are valid.
    """
    name, _, value_text = text.partition("=")
    name = name.replace("-", "_")
    rules = {field.name: field.metadata for field in dataclasses.fields(EngineOptions)}
    if name not in rules or not value_text:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE of an engine option")
    if name in FLAG_ONLY_OPTIONS:
        raise argparse.ArgumentTypeError(f"{text!r}: use {FLAG_ONLY_OPTIONS[name]} instead")
    kind, rule = kind_of(name), rules[name]
    try:
        value = parse_value(kind, value_text)
        low, high = rule["low"], rule["high"]
        if rule["choices"] and value not in rule["choices"]:
            raise ValueError
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {name} must be {describe_values(kind, rule)}") from None
    return name, value


@dataclasses.dataclass(frozen=True, slots=True)
class FlagOption:
    """An engine option whose value comes from flags of the benchmark."""

    flags: tuple[str, ...]
    value: Callable[[argparse.Namespace], Any]
    """Function that computes the value from the flags; if it returns None, the engine's default applies."""


def flag(name: str) -> FlagOption:
    """Return an option that has the value of the flag `name`."""
    return FlagOption((name,), lambda args: getattr(args, name))


def switch(name: str, on: str, off: str) -> FlagOption:
    """Return an option that has the value `on` if the flag `name` is given, else `off`."""
    return FlagOption((name,), lambda args: on if getattr(args, name) else off)


FLAGGED = {
    "model_implementation": flag("model_implementation"),
    "tensor": flag("tensor"),
    "page_size": flag("page_size"),
    "attention_prefill": flag("attention"),
    "attention_decode": flag("attention_decode"),
    "kv_cache_dtype": flag("kv_cache_dtype"),
    "prefill_chunk_tokens": flag("chunk"),
    "steps_in_flight": FlagOption(("depth", "no_overlap"), lambda args: 1 if args.no_overlap else args.depth),
    "cuda_graph": switch("no_graphs", "off", "auto"),
    "fusion": switch("no_fusion", "off", "auto"),
    "prefix_cache": switch("no_prefix_cache", "none", "radix"),
}
"""Engine options that have flags of their own, besides `--engine`."""


def is_smoke_run(args: argparse.Namespace) -> bool:
    """Return whether a run only checks that everything works."""
    return args.device == "cpu" and args.shape == "tiny"


def options_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values, by name, of the engine options that are set by flags of their own."""
    values = {name: option.value(args) for name, option in FLAGGED.items()}
    return {name: value for name, value in values.items() if value is not None}


def engine_options(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return the engine options of a run.

    `more` are options that the benchmark itself sets. They override the benchmark's flags, and `--engine`
    overrides both. Code that needs the value of an engine option must call this function, so that limits and
    titles match the engine that runs.
    """
    # GEMMs of the tiny shape are too short for several threads, which would only wait for each other.
    one_thread = {"threads": 1} if is_smoke_run(args) else {}
    return {"skip_tokenizer": True} | one_thread | options_from_flags(args) | more | dict(args.engine)


def with_variant(args: argparse.Namespace, variant: str) -> argparse.Namespace:
    """Return the command line with the options of a variant, which override `--engine`."""
    return argparse.Namespace(**vars(args) | {"engine": [*args.engine, *VARIANTS[variant].items()]})


def variants_already_off(args: argparse.Namespace) -> list[str]:
    """Return the variants whose engine options are already in effect without `--ablate`."""
    options = engine_options(args)
    return [name for name, change in VARIANTS.items() if change and change.items() <= options.items()]


def parse_args(parser: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """Parse the command line.

    `small` contains defaults that replace the usual ones in a run that only checks that everything works.
    """
    args = parser.parse_args()
    if not is_smoke_run(args):
        return args
    parser.set_defaults(**small)
    return parser.parse_args()


def find_contradiction(args: argparse.Namespace, given: set[str], own: Mapping[str, str]) -> str | None:
    """Return an error message if the command line gives one engine option two different values, else None.

    Args:
        args: the command line.
        given: names of the options on the command line; all others have defaults, which `--engine` overrides.
        own: for each of the benchmark's own options, the engine option that it sets.
    """
    if args.no_overlap and "depth" in given and args.depth != 1:
        return f"--no-overlap is --depth 1, not {args.depth}: leave one of them out"
    flags = options_from_flags(args) | {option: getattr(args, name) for name, option in own.items()}
    names = {option: setting.flags for option, setting in FLAGGED.items()}
    names |= {option: (name,) for name, option in own.items()}
    for name, count in Counter(name for name, _ in args.engine).items():
        if count > 1:
            return f"--engine {name} is given {count} times: keep one"
    for name, value in args.engine:
        if given & {*names.get(name, ())} and flags[name] != value:
            return f"--engine {name}={value}: a flag sets {flags[name]}: leave one of them out"
    return None


def parse_checked_args(
    parser: argparse.ArgumentParser, own: Mapping[str, str] | None = None, /, **small: Any
) -> argparse.Namespace:
    """Parse the command line like `parse_args`, and exit if options contradict each other.

    `own` contains, for each of the benchmark's own options, the engine option that it sets.
    """
    args = parse_args(parser, **small)
    if message := find_contradiction(args, given_options(parser), own or {}):
        parser.error(message)
    return args
