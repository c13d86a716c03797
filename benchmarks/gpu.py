"""What the GPU benchmarks share: options, loading a shape, ends of requests, and what is told of it all."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from arguments import Help, plain, positive
from engine_choices import ON_GPUS, VARIANTS, engine_option, engine_options, off_already, varied
from limits import Limits, add_limits, limits_of
from ran_on import headline, machine, sm_clock
from rank_logs import quiet_ranks
from shapes import SHAPES, shape_folder
from tables import Table, drifts

from mizzen import LLM
from mizzen.core.request import FinishReason
from mizzen.engine.choices import check_options
from mizzen.engine.config import ATTENTION_DECODE, ATTENTION_PREFILL, EngineOptions
from mizzen.models.registry import read_config
from mizzen.parallel.group import RanksFailed

FEWER = "use fewer prompts at once, or raise --engine max_waiting_requests"


def parser(doc: str | None, default: str = "qwen3-0.6b") -> argparse.ArgumentParser:
    """Return the options that all these benchmarks have; `engine_choices.parsed` reads them."""
    made = argparse.ArgumentParser(description=doc, formatter_class=Help)
    made.add_argument("--shape", choices=sorted(SHAPES), default=default, help="model, with random weights")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tells whether all works")
    made.add_argument("--tensor", type=positive, default=1, help="GPUs that share the model")
    made.add_argument("--rounds", type=positive, default=3, help="the median of so many is told")
    add_limits(made)
    made.add_argument("--json", action="store_true", help="end with one JSON object")
    made.add_argument("--page-size", type=positive, default=16, help="tokens in a KV page")
    made.add_argument(
        "--attention", default="auto", help=f"backend of prompts: {', '.join(ATTENTION_PREFILL)}"
    )
    made.add_argument(
        "--attention-decode", default="auto", help=f"backend of decodes: {', '.join(ATTENTION_DECODE)}"
    )
    made.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="numbers of the KV")
    made.add_argument("--depth", type=positive, default=2, help="steps in flight")
    made.add_argument("--no-overlap", action="store_true", help="the same as --depth 1")
    made.add_argument("--no-graphs", action="store_true", help="launch kernel by kernel")
    made.add_argument("--no-fusion", action="store_true", help="run plain operations")
    made.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt whole")
    made.add_argument("--chunk", type=positive, help="prompt tokens in one step at most; else as LLM has it")
    made.add_argument(
        "--engine",
        type=engine_option,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="any options of the engine",
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


def left_out(args: argparse.Namespace, without: Mapping[str, str]) -> dict[str, str]:
    """Return which variants `--ablate` does not measure, and why; `without` are a benchmark's own."""
    absent = dict.fromkeys(ON_GPUS if args.device == "cpu" else (), "a CPU has none")
    return {**absent, **dict.fromkeys(off_already(args), "off throughout"), **without}


def variants(args: argparse.Namespace, without: Mapping[str, str]) -> list[str]:
    """Return what to measure: with `--ablate` all variants but those that are left out."""
    out = left_out(args, without)
    return [name for name in VARIANTS if name not in out] if args.ablate else ["all on"]


def title(args: argparse.Namespace, variant: str) -> str:
    """Return a table's title: what was asked for, by the options that the engine gets."""
    gpus = engine_options(args)["tensor"]
    told = args.shape + (f", {gpus} GPUs" if gpus > 1 else "")
    if not args.ablate:
        return told
    off = ", ".join(name.removesuffix(" off") for name in off_already(args))
    return f"{told}, {variant}" + (f" (off throughout: {off})" if off else "")


def run(args: argparse.Namespace, measure: Measure, *, without: Mapping[str, str] | None = None) -> None:
    """Measure, and with `--ablate` again with each part off; print tables and JSON.

    Args:
        args: the command line.
        measure: measures one variant.
        without: variants that mean nothing here, and why.
    """
    need_device(args.device)
    clock = sm_clock(args.device)

    def measured(name: str, behind: str = "") -> dict[str, Any]:
        table = Table(title(args, name) + behind + headline(args.device, sm_clock(args.device)))
        return measure(varied(args, name), table) | {"rows": table.rows}

    results = {name: measured(name) for name in variants(args, without or {})}
    told: dict[str, Any] = results["all on"]
    if args.ablate:
        told = {"variants": results, "left_out": left_out(args, without or {})}
        told["again"] = measured("all on", " again")
        told["drift"] = drifts(results["all on"]["rows"], told["again"]["rows"])
        ablated(told["drift"], told["left_out"])
    ran_on = machine(args.device, clock)
    if ran_on["sm_clock_mhz"]["after"] is not None:
        print("  SM clock {before} MHz before, {after} MHz after".format(**ran_on["sm_clock_mhz"]))
    if args.json:
        options = {k: v for k, v in vars(args).items() if k != "json"}
        print(json.dumps(plain({"options": options, "machine": ran_on, **told}), default=str))


def ablated(drift: Mapping[str, float], out: Mapping[str, str]) -> None:
    """Print how far the machine itself moved meanwhile, and what was not measured."""
    print("drift of all on, from the first time to the last:")
    for work, change in drift.items():
        print(f"  {work:<26} {change:+.1%}")
    for name, why in out.items():
        print(f"left out: {name}: {why}")


def started(llm: LLM) -> dict[str, Any]:
    """Print how the engine came up and which attention it runs, and return it."""
    info = llm.engine.info
    print("  start-up: " + ", ".join(f"{name} {value:.1f} s" for name, value in info.phases.items()))
    print("  attention: decodes {}, prompts {}".format(*info.attention))
    return {"phases": info.phases, "attention": dict(zip(("decode", "prefill"), info.attention, strict=True))}


def room(llm: LLM) -> tuple[str, str]:
    """Return what bounds the tokens of a request, in words, and how to raise it, where that can be."""
    info = llm.engine.info
    if info.pages_total * info.page_size <= info.context_length:
        return f"the {info.context_length} tokens that the KV cache holds", "raise --engine kv_cache_tokens"
    told = f"the context length of {info.context_length} tokens"
    return told, "raise --engine context_length" if llm.options.context_length else ""


def advice(llm: LLM, message: str) -> str:
    """Return what to do about the reason for which a prompt was refused."""
    if "waiting already" in message:
        return FEWER
    if "leaves room for" in message:
        return ", or ".join(filter(None, ["use shorter prompts", room(llm)[1]]))
    return "the engine takes no such prompt"


def check_ended(llm: LLM, work: str) -> None:
    """End with the reason where a request was refused: nothing of it ran, so no time tells anything."""
    for ended in llm.engine.take_ended():
        if ended.reason is FinishReason.ERROR:
            fail(f"{work}: prompt refused: {ended.message}: {advice(llm, ended.message)}")


def drain(llm: LLM, work: str) -> None:
    """Run what is left in the engine; end with the reason where a request of this work was refused."""
    while llm.engine.busy:
        llm.engine.step(0.0)
    check_ended(llm, work)
    llm.engine.take_cache_events()


def median(values: list[float]) -> float:
    return statistics.median(values)
