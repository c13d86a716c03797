# SPDX-License-Identifier: Apache-2.0
"""Throughput on this CPU compared with Transformers' `generate`, on the same weights, threads and prompts.

    python benchmarks/cpu_vs_transformers.py [--json]

Both engines generate 64 tokens for each of 16 prompts of 544 tokens, greedily and in float32. There are two
cases: either all prompts share their first 512 tokens, which Mizzen keeps in its prefix cache, or no two
prompts share a prefix. Both engines are warm; Transformers uses SDPA and its KV cache. Runs of the two
engines alternate, so that other load on the machine affects both, and their medians are compared. Throughput
is in output tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from mizzen import LLM, SamplingParams

GOALS = {"shared": 2.0, "distinct": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a run, in requests and tokens."""

    batch: int = 16
    shared: int = 512
    own: int = 32
    output: int = 64
    rounds: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama with 33 million parameters, so small that all rounds take only two minutes on two cores."""

    vocab_size: int = 8192
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 1024


def make_model(folder: Path, shape: Shape) -> transformers.LlamaForCausalLM:
    """Create a model with random weights, save it to a folder, and return the model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**asdict(shape), attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


def make_prompts(work: Workload, shape: Shape, seed: int, shared: bool) -> list[list[int]]:
    """Return random prompts as token ids; if `shared`, they have a common prefix."""
    rng = np.random.default_rng(seed)
    length = work.shared + work.own
    prompts = rng.integers(3, shape.vocab_size, (work.batch, length))
    if shared:
        prompts[:, : work.shared] = np.random.default_rng(0).integers(3, shape.vocab_size, work.shared)
    return prompts.tolist()


def run_transformers(
    model: transformers.LlamaForCausalLM, prompts: list[list[int]], work: Workload
) -> list[list[int]]:
    """Run prompts with Transformers; return the generated token ids."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            min_new_tokens=work.output,
            max_new_tokens=work.output,
            pad_token_id=0,
        )
    return out[:, ids.shape[1] :].tolist()


def run_mizzen(llm: LLM, prompts: list[list[int]], work: Workload) -> list[list[int]]:
    """Run prompts with Mizzen; return the generated token ids."""
    params = SamplingParams(temperature=0, max_tokens=work.output, ignore_eos=True)
    return [answer.token_ids for answer in llm.generate(prompts, params, progress=False)]


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Return the seconds that a call takes, and its result."""
    begin = time.perf_counter()
    tokens = run()
    return time.perf_counter() - begin, tokens


def same_share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of prompts for which both engines generated the same tokens."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def measure(
    llm: LLM, model: transformers.LlamaForCausalLM, work: Workload, shape: Shape, case: str
) -> dict[str, float]:
    """Measure a case with alternating runs of both engines.

    Every round has new prompts, so that only the shared prefix can be in the prefix cache.
    """
    shared = case == "shared"
    warm = make_prompts(work, shape, seed=1, shared=shared)
    run_mizzen(llm, warm, work)
    run_transformers(model, warm, work)
    seconds: dict[str, list[float]] = {"mizzen": [], "transformers": []}
    same = []
    for round_ in range(work.rounds):
        prompts = make_prompts(work, shape, seed=2 + round_, shared=shared)
        took, ours = timed(lambda prompts=prompts: run_mizzen(llm, prompts, work))
        seconds["mizzen"].append(took)
        took, theirs = timed(lambda prompts=prompts: run_transformers(model, prompts, work))
        seconds["transformers"].append(took)
        same.append(same_share(ours, theirs))
    tokens = work.batch * work.output
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    return {
        "mizzen_tokens_per_second": round(rates["mizzen"], 1),
        "transformers_tokens_per_second": round(rates["transformers"], 1),
        "ratio": round(rates["mizzen"] / rates["transformers"], 3),
        "goal": GOALS[case],
        "same_answers": round(statistics.mean(same), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    work, shape = Workload(), Shape()
    results: dict[str, object] = {"threads": args.threads}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), shape)
        results["parameters"] = sum(weights.numel() for weights in model.parameters())
        # Enough KV for all rounds of both cases, like an engine that sizes its cache from free memory.
        capacity = 8 * work.batch * (work.shared + work.own + work.output)
        with LLM(
            folder,
            device="cpu",
            threads=args.threads,
            skip_tokenizer=True,
            kv_cache_tokens=capacity,
            max_running_requests=work.batch,
            prefill_chunk_tokens=2048,
        ) as llm:
            for case in GOALS:
                figures = results[case] = measure(llm, model, work, shape, case)
                print(
                    f"{case:>8}: Mizzen {figures['mizzen_tokens_per_second']:.0f} tokens/s, Transformers "
                    f"{figures['transformers_tokens_per_second']:.0f}: {figures['ratio']:.2f}x "
                    f"(goal {figures['goal']:.0f}x, {figures['ratio'] / figures['goal']:.0%})"
                )
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
