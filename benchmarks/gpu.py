"""What the GPU benchmarks share: model shapes with random weights, limits, options, and the table."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mizzen import LLM
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
    "llama-3.2-1b": shape(
        LLAMA3, 2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True, rope_scaling=llama_rope(32.0)
    ),
    "llama-3.1-8b": shape(
        LLAMA3, 4096, 14336, 32, 32, head_dim=128, tie_word_embeddings=False, rope_scaling=llama_rope(8.0)
    ),
}
"""config.json of the checkpoints that these names stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one GPU can do at most with a model in bfloat16, from bytes moved and operations done."""

    config: ModelConfig
    bandwidth: float
    """Bytes a second."""
    flops: float
    """Operations a second."""
    kv_element: int = 2
    """Bytes of a number in the KV cache."""

    @property
    def body(self) -> int:
        """Weights of all layers."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
        return c.layers * (attention + 3 * c.hidden_size * c.intermediate_size)

    @property
    def head(self) -> int:
        """Weights of the output head."""
        return self.config.hidden_size * self.config.vocab_size

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return 2 * self.config.layers * self.config.kv_heads * self.config.head_dim * self.kv_element

    def decode(self, batch: int, context: float) -> float:
        """Seconds of a step that decodes `batch` rows of `context` tokens each."""
        weights = self.body + self.head
        products = max(2 * weights / self.bandwidth, 2 * weights * batch / self.flops)
        return products + batch * context * self.token_bytes / self.bandwidth

    def prefill(self, tokens: int, start: int = 0) -> float:
        """Seconds of running `tokens` prompt tokens behind `start` others."""
        c = self.config
        pairs = tokens * start + tokens * tokens / 2
        return (2 * self.body * tokens + 4 * c.layers * c.heads * c.head_dim * pairs) / self.flops


def parser(doc: str | None, default: str = "qwen3-0.6b") -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--shape", choices=sorted(SHAPES), default=default)
    made.add_argument("--rounds", type=int, default=3, help="the median of so many is told")
    made.add_argument("--bandwidth", type=float, default=4.28, help="TB/s that the limit is computed with")
    made.add_argument("--tflops", type=float, default=799, help="TFLOP/s that the limit is computed with")
    made.add_argument("--json", action="store_true", help="end with one JSON object")
    made.add_argument("--page-size", type=int, default=16)
    made.add_argument("--attention", default="auto", help="attention backend of prompts")
    made.add_argument("--attention-decode", default="auto", help="attention backend of decodes")
    made.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    made.add_argument("--depth", type=int, default=2, help="steps in flight; 1 is without overlap")
    made.add_argument("--no-graphs", action="store_true", help="run decodes eagerly")
    made.add_argument("--no-fusion", action="store_true", help="run plain operations")
    made.add_argument("--no-prefix-cache", action="store_true")
    made.add_argument("--chunk", type=int, default=8192, help="prompt tokens in one step at most")
    return made


@contextmanager
def load(args: argparse.Namespace, **more: Any) -> Iterator[tuple[LLM, Limits]]:
    """Load the chosen shape with random weights and the chosen options."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        limits = Limits(
            config=read_config(Path(folder)),
            bandwidth=args.bandwidth * 1e12,
            flops=args.tflops * 1e12,
            kv_element=1 if args.kv_cache_dtype == "fp8" else 2,
        )
        options = {
            "load_format": "dummy",
            "skip_tokenizer": True,
            "page_size": args.page_size,
            "attention_prefill": args.attention,
            "attention_decode": args.attention_decode,
            "kv_cache_dtype": args.kv_cache_dtype,
            "steps_in_flight": args.depth,
            "cuda_graph": "off" if args.no_graphs else "auto",
            "fusion": "off" if args.no_fusion else "auto",
            "prefix_cache": "none" if args.no_prefix_cache else "radix",
            "prefill_chunk_tokens": args.chunk,
            **more,
        }
        with LLM(folder, device="cuda", **options) as llm:
            yield llm, limits


def drain(llm: LLM) -> None:
    """Run what is left in the engine."""
    while llm.engine.busy:
        llm.engine.step(0.0)
    llm.engine.take_ended()
    llm.engine.take_cache_events()


def median(values: list[float]) -> float:
    return statistics.median(values)


def finish(args: argparse.Namespace, llm: LLM, results: dict[str, Any]) -> None:
    """Print how the engine came up, and the object that `--json` asks for."""
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in llm.engine.info.phases.items())
    print(f"start-up: {seconds}")
    if args.json:
        options = {k: v for k, v in vars(args).items() if k != "json"}
        print(json.dumps({"options": options, "phases": llm.engine.info.phases, **results}))
