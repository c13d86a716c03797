"""What the GPU benchmarks share: model shapes with random weights, limits, options, and the table."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from limits import Limits, add_limits, limits_of

from mizzen import LLM
from mizzen.engine.config import EngineOptions
from mizzen.models.config import ModelConfig
from mizzen.models.registry import read_config

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
}
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "eos_token_id": 128001,
}


def shape(
    base: dict[str, Any], hidden: int, middle: int, layers: int, heads: int, **more: Any
) -> dict[str, Any]:
    return {
        **base,
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        **more,
    }


def llama_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": shape(QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-8b": shape(QWEN3, 4096, 12288, 36, 32, tie_word_embeddings=False),
    "qwen3-32b": shape(QWEN3, 5120, 25600, 64, 64, tie_word_embeddings=False),
    "llama-3.2-1b": shape(
        LLAMA3, 2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True, rope_scaling=llama_rope(32.0)
    ),
    "llama-3.1-8b": shape(
        LLAMA3, 4096, 14336, 32, 32, head_dim=128, tie_word_embeddings=False, rope_scaling=llama_rope(8.0)
    ),
    "tiny": shape(QWEN3, 64, 96, 2, 8, tie_word_embeddings=True, head_dim=16, vocab_size=512, eos_token_id=1),
}
"""config.json of the checkpoints that these names stand for; tiny is none, and tells whether all works."""

VARIANTS: dict[str, dict[str, Any]] = {
    "all on": {},
    "graphs off": {"no_graphs": True},
    "overlap off": {"no_overlap": True},
    "prefix cache off": {"no_prefix_cache": True},
    "fusion off": {"no_fusion": True},
}


class Table:
    """Rows of a figure, its limit, and how near it is; printed as they come."""

    def __init__(self, title: str) -> None:
        print(title)
        print(f"  {'work':<26} {'measured':>16} {'limit':>16} {'of limit':>9}", flush=True)

    def row(self, work: str, figure: float, limit: float | None, unit: str, note: str = "") -> float | None:
        """Print a row; return the share of the limit. A rate has a limit above it, a time one below it."""
        share = None if limit is None else figure / limit if unit.endswith("/s") else limit / figure
        cells = [f"{number:,.2f} {unit}" if number is not None else "-" for number in (figure, limit)]
        percent = "-" if share is None else f"{share:.0%}"
        print(f"  {work:<26} {cells[0]:>16} {cells[1]:>16} {percent:>9}  {note}".rstrip(), flush=True)
        return share


def engine_option(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, an option of the engine."""
    name, _, value = text.partition("=")
    name = name.replace("-", "_")
    kinds = typing.get_type_hints(EngineOptions)
    if name not in kinds or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE of an engine option")
    kind = kinds[name]
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return name, value == "true" if kind is bool else kind(value)


def parser(doc: str | None, default: str = "qwen3-0.6b") -> argparse.ArgumentParser:
    """Return the options that all these benchmarks have."""
    made = argparse.ArgumentParser(description=(doc or " ").splitlines()[0])
    made.add_argument("--shape", choices=sorted(SHAPES), default=default)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tells whether all works")
    made.add_argument("--tensor", type=int, default=1, help="GPUs that share the model")
    made.add_argument("--rounds", type=int, default=3, help="the median of so many is told")
    add_limits(made)
    made.add_argument("--json", action="store_true", help="end with one JSON object")
    made.add_argument("--page-size", type=int, default=16)
    made.add_argument("--attention", default="auto", help="attention backend of prompts")
    made.add_argument("--attention-decode", default="auto", help="attention backend of decodes")
    made.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    made.add_argument("--depth", type=int, default=2, help="steps in flight")
    made.add_argument("--no-overlap", action="store_true", help="the same as --depth 1")
    made.add_argument("--no-graphs", action="store_true", help="launch kernel by kernel")
    made.add_argument("--no-fusion", action="store_true", help="run plain operations")
    made.add_argument("--no-prefix-cache", action="store_true")
    made.add_argument("--chunk", type=int, default=8192, help="prompt tokens in one step at most")
    made.add_argument(
        "--engine", type=engine_option, nargs="+", default=[], metavar="NAME=VALUE", help="engine options"
    )
    made.add_argument("--ablate", action="store_true", help="measure again with each part off")
    return made


@contextmanager
def shape_folder(shape: str) -> Iterator[Path]:
    """Have a model folder of a shape, without weights, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        yield Path(folder)


def config_of(shape: str) -> ModelConfig:
    """Return the configuration of a shape."""
    with shape_folder(shape) as folder:
        return read_config(folder)


@contextmanager
def load(args: argparse.Namespace, **more: Any) -> Iterator[tuple[LLM, Limits]]:
    """Load the chosen shape with random weights and the chosen options."""
    with shape_folder(args.shape) as folder:
        options = engine_options(args) | {"load_format": "dummy"} | more | dict(args.engine)
        try:
            loaded = LLM(folder, device=args.device, **options)
        except ValueError as error:  # an option that cannot be, or too little memory
            sys.exit(f"the engine cannot be loaded: {error}")
        with loaded as llm:
            yield llm, limits_of(args, read_config(folder))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the chosen options of the engine."""
    return {
        "skip_tokenizer": True,
        "tensor": args.tensor,
        "page_size": args.page_size,
        "attention_prefill": args.attention,
        "attention_decode": args.attention_decode,
        "kv_cache_dtype": args.kv_cache_dtype,
        "steps_in_flight": 1 if args.no_overlap else args.depth,
        "cuda_graph": "off" if args.no_graphs else "auto",
        "fusion": "off" if args.no_fusion else "auto",
        "prefix_cache": "none" if args.no_prefix_cache else "radix",
        "prefill_chunk_tokens": args.chunk,
    }


def need_device(device: str) -> None:
    """End with a message where there is no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is here; --device cpu --shape tiny only tells whether all works")


Measure = Callable[[argparse.Namespace, Table], dict[str, Any]]
"""Measures with the given options, fills a table and returns the figures."""


def run(args: argparse.Namespace, measure: Measure, *, without: tuple[str, ...] = ()) -> None:
    """Measure, and with `--ablate` again with each part off (but those `without`); print tables and JSON."""
    need_device(args.device)
    names = [name for name in VARIANTS if name not in without] if args.ablate else ["all on"]
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        chosen = argparse.Namespace(**vars(args) | VARIANTS[name])
        gpus = f", {args.tensor} GPUs" if args.tensor > 1 else ""
        table = Table(f"{args.shape}{gpus}" + (f", {name}" if args.ablate else ""))
        results[name] = measure(chosen, table)
    if args.json:
        told = {"variants": results} if args.ablate else results["all on"]
        options = {k: v for k, v in vars(args).items() if k != "json"}
        print(json.dumps({"options": options, **told}, default=str))


def started(llm: LLM) -> dict[str, Any]:
    """Print how the engine came up and which attention it runs, and return it."""
    info = llm.engine.info
    print("  start-up: " + ", ".join(f"{name} {value:.1f} s" for name, value in info.phases.items()))
    print("  attention: decodes {}, prompts {}".format(*info.attention))
    return {"phases": info.phases, "attention": dict(zip(("decode", "prefill"), info.attention, strict=True))}


def drain(llm: LLM) -> None:
    """Run what is left in the engine."""
    while llm.engine.busy:
        llm.engine.step(0.0)
    llm.engine.take_ended()
    llm.engine.take_cache_events()


def median(values: list[float]) -> float:
    return statistics.median(values)
