"""What the GPU benchmarks share: options, loading a shape, ends of requests, and the table."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from arguments import plain, positive
from engine_choices import ON_GPUS, VARIANTS, engine_option, engine_options, off_already, varied
from limits import Limits, add_limits, limits_of
from rank_logs import quiet_ranks
from shapes import SHAPES, shape_folder

from mizzen import LLM
from mizzen.core.request import FinishReason
from mizzen.engine.choices import check_options
from mizzen.engine.config import EngineOptions
from mizzen.models.registry import read_config
from mizzen.parallel.group import RanksFailed

ROOM = "use shorter or fewer prompts, or raise --engine kv_cache_tokens or max_waiting_requests"


class Table:
    """Rows of a figure, its limit, and how near it is; printed as they come."""

    def __init__(self, title: str) -> None:
        print(title)
        print(f"  {'work':<26} {'measured':>16} {'limit':>16} {'of limit':>9}", flush=True)

    def row(self, work: str, figure: float, limit: float | None, unit: str, note: str = "") -> float | None:
        """Print a row; return the share of the limit. A rate has a limit above it, a time one below it.

        There is no share where the limit is None or not known (NaN).
        """
        limit = None if limit is None or math.isnan(limit) else limit
        share = None if limit is None else figure / limit if unit.endswith("/s") else limit / figure
        cells = [f"{number:,.2f} {unit}" if number is not None else "-" for number in (figure, limit)]
        percent = "-" if share is None else f"{share:.0%}"
        print(f"  {work:<26} {cells[0]:>16} {cells[1]:>16} {percent:>9}  {note}".rstrip(), flush=True)
        return share


def parser(doc: str | None, default: str = "qwen3-0.6b") -> argparse.ArgumentParser:
    """Return the options that all these benchmarks have; `engine_choices.parsed` reads them."""
    made = argparse.ArgumentParser(description=(doc or " ").splitlines()[0])
    made.add_argument("--shape", choices=sorted(SHAPES), default=default)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tells whether all works")
    made.add_argument("--tensor", type=positive, default=1, help="GPUs that share the model")
    made.add_argument("--rounds", type=positive, default=3, help="the median of so many is told")
    add_limits(made)
    made.add_argument("--json", action="store_true", help="end with one JSON object")
    made.add_argument("--page-size", type=positive, default=16)
    made.add_argument("--attention", default="auto", help="attention backend of prompts")
    made.add_argument("--attention-decode", default="auto", help="attention backend of decodes")
    made.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    made.add_argument("--depth", type=positive, default=2, help="steps in flight")
    made.add_argument("--no-overlap", action="store_true", help="the same as --depth 1")
    made.add_argument("--no-graphs", action="store_true", help="launch kernel by kernel")
    made.add_argument("--no-fusion", action="store_true", help="run plain operations")
    made.add_argument("--no-prefix-cache", action="store_true")
    made.add_argument("--chunk", type=positive, default=8192, help="prompt tokens in one step at most")
    made.add_argument(
        "--engine", type=engine_option, nargs="+", default=[], metavar="NAME=VALUE", help="engine options"
    )
    made.add_argument("--ablate", action="store_true", help="measure again with each part off")
    return made


def fail(message: str) -> NoReturn:
    """End with a message: what was asked for cannot be measured."""
    sys.exit(f"error: {message}")


def check_engine(device: str, folder: Path, options: dict[str, Any]) -> None:
    """End where an option stands against an engine, before its ranks start: each would say so again."""
    known = {name: value for name, value in options.items() if name not in ("skip_tokenizer", "device")}
    try:
        check_options(EngineOptions(model=str(folder), device=device, **known), read_config(folder))
    except ValueError as error:
        sys.exit(f"the engine cannot be loaded: {error}")


@contextmanager
def loaded(device: str, folder: Path, options: dict[str, Any]) -> Iterator[LLM]:
    """Load an engine, or end with what stands against it."""
    check_engine(device, folder, options)
    try:
        with quiet_ranks(options["tensor"]):
            made = LLM(folder, device=device, **options)
    except (ValueError, RanksFailed) as error:  # an option that cannot be, or too little memory
        sys.exit(f"the engine cannot be loaded: {error}")
    with made as llm:
        yield llm


@contextmanager
def load(args: argparse.Namespace, **more: Any) -> Iterator[tuple[LLM, Limits]]:
    """Load the chosen shape with random weights and the chosen options."""
    options = engine_options(args, load_format="dummy", **more)
    with shape_folder(args.shape) as folder, loaded(args.device, folder, options) as llm:
        yield llm, limits_of(args, read_config(folder), options)


def need_device(device: str) -> None:
    """End with a message where there is no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is here; --device cpu --shape tiny only tells whether all works")


Measure = Callable[[argparse.Namespace, Table], dict[str, Any]]
"""Measures with the given options, fills a table and returns the figures."""


def variants(args: argparse.Namespace, without: tuple[str, ...]) -> list[str]:
    """Return what to measure: with `--ablate` all but `without` and what would change nothing."""
    if not args.ablate:
        return ["all on"]
    same = [*(ON_GPUS if args.device == "cpu" else ()), *off_already(args)]
    return [name for name in VARIANTS if name not in without and name not in same]


def title(args: argparse.Namespace, variant: str) -> str:
    """Return a table's title: what was asked for, by the options that the engine gets."""
    gpus = engine_options(args)["tensor"]
    told = args.shape + (f", {gpus} GPUs" if gpus > 1 else "")
    if not args.ablate:
        return told
    off = ", ".join(name.removesuffix(" off") for name in off_already(args))
    return f"{told}, {variant}" + (f" (off throughout: {off})" if off else "")


def run(args: argparse.Namespace, measure: Measure, *, without: tuple[str, ...] = ()) -> None:
    """Measure, and with `--ablate` again with each part off (but those `without`); print tables and JSON."""
    need_device(args.device)
    results: dict[str, dict[str, Any]] = {}
    for name in variants(args, without):
        results[name] = measure(varied(args, name), Table(title(args, name)))
    if args.json:
        told = {"variants": results} if args.ablate else results["all on"]
        options = {k: v for k, v in vars(args).items() if k != "json"}
        print(json.dumps(plain({"options": options, **told}), default=str))


def started(llm: LLM) -> dict[str, Any]:
    """Print how the engine came up and which attention it runs, and return it."""
    info = llm.engine.info
    print("  start-up: " + ", ".join(f"{name} {value:.1f} s" for name, value in info.phases.items()))
    print("  attention: decodes {}, prompts {}".format(*info.attention))
    return {"phases": info.phases, "attention": dict(zip(("decode", "prefill"), info.attention, strict=True))}


def check_ended(llm: LLM, work: str) -> None:
    """End with the reason where a request was refused: nothing of it ran, so no time tells anything."""
    for ended in llm.engine.take_ended():
        if ended.reason is FinishReason.ERROR:
            fail(f"{work}: prompt refused: {ended.message}: {ROOM}")


def drain(llm: LLM, work: str) -> None:
    """Run what is left in the engine; end with the reason where a request of this work was refused."""
    while llm.engine.busy:
        llm.engine.step(0.0)
    check_ended(llm, work)
    llm.engine.take_cache_events()


def median(values: list[float]) -> float:
    return statistics.median(values)
