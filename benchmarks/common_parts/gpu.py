# SPDX-License-Identifier: Apache-2.0
"""Shared code of the GPU benchmarks: options, loading an engine, checking requests, and printing results."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from common_parts.arguments import Help, jsonable, positive
from common_parts.engine_options import (
    GPU_ONLY_VARIANTS,
    VARIANTS,
    engine_option,
    engine_options,
    variants_already_off,
    with_variant,
)
from common_parts.limits import Limits, add_limit_options, limits_of, measure_roofline
from common_parts.machine_info import headline, machine, sm_clock
from common_parts.rank_logs import quiet_ranks
from common_parts.shapes import SHAPES, shape_folder
from common_parts.tables import Table, drifts
from mizzen import LLM
from mizzen.core.request import FinishReason
from mizzen.engine.config import (
    ATTENTION_DECODE,
    ATTENTION_PREFILL,
    MODEL_IMPLEMENTATIONS,
    EngineOptions,
)
from mizzen.engine.loading.model_setup import inspect_config
from mizzen.engine.loading.resolve import check_options
from mizzen.models.registry import read_config
from mizzen.parallel.process_group import RanksFailed

FEWER_PROMPTS = "use fewer prompts at once, or raise --engine max_waiting_requests"


def benchmark_parser(
    doc: str | None, default: str = "qwen3-0.6b", shapes: Iterable[str] = SHAPES
) -> argparse.ArgumentParser:
    """Return a parser with the shared options; parse them with `engine_options.parse_checked_args`.

    `shapes` are the choices of `--shape`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=Help)
    parser.add_argument(
        "--shape",
        choices=sorted(shapes),
        default=default,
        help="shape of the model, which has random weights",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only checks that everything works"
    )
    parser.add_argument("--tensor", type=positive, default=1, help="GPUs that share the model")
    parser.add_argument("--rounds", type=positive, default=3, help="number of rounds; the median counts")
    add_limit_options(parser)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--page-size", type=positive, default=16, help="tokens in a KV page")
    parser.add_argument(
        "--attention", default="auto", help=f"backend of prefill: {', '.join(ATTENTION_PREFILL)}"
    )
    parser.add_argument(
        "--attention-decode", default="auto", help=f"backend of decodes: {', '.join(ATTENTION_DECODE)}"
    )
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="precision of the KV cache"
    )
    parser.add_argument(
        "--model-implementation",
        default="auto",
        choices=MODEL_IMPLEMENTATIONS,
        help="transformers runs the model's code in Transformers",
    )
    parser.add_argument("--depth", type=positive, default=2, help="maximum number of steps in flight")
    parser.add_argument("--no-overlap", action="store_true", help="the same as --depth 1")
    parser.add_argument(
        "--no-graphs", action="store_true", help="launch kernels one by one, without CUDA graphs"
    )
    parser.add_argument(
        "--no-fusion", action="store_true", help="run separate operations instead of fused kernels"
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="prefill every prompt completely")
    parser.add_argument(
        "--chunk", type=positive, help="maximum prefill tokens per step; by default that of LLM"
    )
    parser.add_argument(
        "--engine",
        type=engine_option,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="engine options of the form NAME=VALUE",
    )
    parser.add_argument(
        "--ablate", action="store_true", help="measure again with each optimization turned off"
    )
    return parser


def fail(message: str) -> NoReturn:
    """Exit with an error message that says why the requested figure cannot be measured."""
    sys.exit(f"error: {message}")


def check_engine(device: str, folder: Path, options: dict[str, Any]) -> None:
    """Exit if the engine would reject an option. Without this check, every rank would report the error."""
    checked = {name: value for name, value in options.items() if name not in ("skip_tokenizer", "device")}
    try:
        engine = EngineOptions(model=str(folder), device=device, **checked)
        check_options(engine, inspect_config(engine, read_config(folder, engine.model_implementation)))
    except ValueError as error:
        sys.exit(f"the engine cannot be loaded: {error}")


@contextmanager
def loaded(device: str, folder: Path, options: dict[str, Any]) -> Iterator[LLM]:
    """Provide an engine that is loaded from a model folder; exit with the reason if it cannot be loaded."""
    check_engine(device, folder, options)
    try:
        with quiet_ranks(options["tensor"]):
            engine = LLM(folder, device=device, **options)
    except (ValueError, RanksFailed) as error:  # an invalid option, or too little memory
        sys.exit(f"the engine cannot be loaded: {error}")
    with engine as llm:
        yield llm


@contextmanager
def load(args: argparse.Namespace, **more: Any) -> Iterator[tuple[LLM, Limits]]:
    """Provide an engine with random weights, and its limits; the command line gives its shape and options.

    `more` are engine options that the benchmark itself sets.
    """
    options = engine_options(args, load_format="dummy", **more)
    with shape_folder(args.shape) as folder, loaded(args.device, folder, options) as llm:
        yield llm, limits_of(args, read_config(folder), options)


def require_device(device: str) -> None:
    """Exit with a message if the device is not available."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU found; --device cpu --shape tiny only checks that everything works")


Measure = Callable[[argparse.Namespace, Table], dict[str, Any]]
"""Function that measures with the given command line, adds rows to a table and returns the figures."""


def left_out(args: argparse.Namespace, without: Mapping[str, str]) -> dict[str, str]:
    """Return the variants that `--ablate` skips, with reasons, including the variants in `without`."""
    absent = dict.fromkeys(GPU_ONLY_VARIANTS if args.device == "cpu" else (), "not on a CPU")
    return {**absent, **dict.fromkeys(variants_already_off(args), "off throughout"), **without}


def variants(args: argparse.Namespace, without: Mapping[str, str]) -> list[str]:
    """Return the variants to measure: only "all on", or with `--ablate` every variant not in `left_out`."""
    out = left_out(args, without)
    return [name for name in VARIANTS if name not in out] if args.ablate else ["all on"]


def title(args: argparse.Namespace, variant: str) -> str:
    """Return the title of a variant's table, with the shape and the number of GPUs."""
    gpus = engine_options(args)["tensor"]
    shape = args.shape + (f", {gpus} GPUs" if gpus > 1 else "")
    if not args.ablate:
        return shape
    off = ", ".join(name.removesuffix(" off") for name in variants_already_off(args))
    return f"{shape}, {variant}" + (f" (off throughout: {off})" if off else "")


def run(args: argparse.Namespace, measure: Measure, *, without: Mapping[str, str] | None = None) -> None:
    """Measure "all on", or with `--ablate` each variant; print tables, and with `--json` one JSON object.

    Args:
        args: the command line.
        measure: the function that measures one variant.
        without: variants that make no sense for this benchmark, with reasons.
    """
    require_device(args.device)
    measure_roofline(args)
    clock = sm_clock(args.device)

    def measure_variant(name: str, suffix: str = "") -> dict[str, Any]:
        table = Table(title(args, name) + suffix + headline(args.device, sm_clock(args.device)))
        return measure(with_variant(args, name), table) | {"rows": table.rows}

    results = {name: measure_variant(name) for name in variants(args, without or {})}
    output: dict[str, Any] = results["all on"]
    if args.ablate:
        output = {"variants": results, "left_out": left_out(args, without or {})}
        output["again"] = measure_variant("all on", " again")
        output["drift"] = drifts(results["all on"]["rows"], output["again"]["rows"])
        print_drift(output["drift"], output["left_out"])
    measured_on = machine(args.device, clock)
    if measured_on["sm_clock_mhz"]["after"] is not None:
        print("  SM clock {before} MHz before, {after} MHz after".format(**measured_on["sm_clock_mhz"]))
    if args.json:
        options = {k: v for k, v in vars(args).items() if k != "json"}
        print(json.dumps(jsonable({"options": options, "machine": measured_on, **output}), default=str))


def print_drift(drift: Mapping[str, float], out: Mapping[str, str]) -> None:
    """Print how figures changed from the first to the last run of "all on"; then print skipped variants."""
    print("drift of all on, from the first run to the last:")
    for work, change in drift.items():
        print(f"  {work:<26} {change:+.1%}")
    for name, why in out.items():
        print(f"left out: {name}: {why}")


def print_startup(llm: LLM) -> dict[str, Any]:
    """Print the engine's start-up phases and attention backends, and return them."""
    info = llm.engine.info
    print("  start-up: " + ", ".join(f"{name} {value:.1f} s" for name, value in info.phases.items()))
    print("  attention: decode {}, prefill {}".format(*info.attention))
    return {"phases": info.phases, "attention": dict(zip(("decode", "prefill"), info.attention, strict=True))}


def token_bound(llm: LLM) -> tuple[str, str]:
    """Return what limits the number of tokens in a request, and how to raise the limit ("" if impossible)."""
    info = llm.engine.info
    if info.pages_total * info.page_size <= info.context_length:
        return f"the KV cache of {info.context_length} tokens", "raise --engine kv_cache_tokens"
    bound = f"the context length of {info.context_length} tokens"
    return bound, "raise --engine context_length" if llm.options.context_length else ""


def advice(llm: LLM, message: str) -> str:
    """Return advice on a prompt that was rejected with `message`."""
    if "waiting already" in message:
        return FEWER_PROMPTS
    if "leaves room for" in message:
        return ", or ".join(filter(None, ["use shorter prompts", token_bound(llm)[1]]))
    return "the engine does not accept such a prompt"


def check_ended(llm: LLM, work: str) -> None:
    """Exit with the reason if a request of `work` was rejected, as the measured time is then meaningless."""
    for ended in llm.engine.drain_finished():
        if ended.reason is FinishReason.ERROR:
            fail(f"{work}: prompt rejected: {ended.message}: {advice(llm, ended.message)}")


def drain(llm: LLM, work: str) -> None:
    """Run the engine until it is idle; exit with the reason if a request of `work` was rejected."""
    while llm.engine.busy:
        llm.engine.step(0.0)
    check_ended(llm, work)
    llm.engine.drain_cache_events()


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)
