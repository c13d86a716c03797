# SPDX-License-Identifier: Apache-2.0
"""Embeddings on this CPU compared with padded batches of Transformers, on the same weights and texts.

    python benchmarks/encoders/embed_cpu.py [--json]

The model has the shape of BERT-base and random weights. The lengths of 128 texts are lognormal, from 4 to 512
tokens with a median near 60. Transformers computes them as sentence-transformers does: sorted by length, in
batches of 32 that are padded to their longest text, with SDPA and the mean over all tokens that are no
padding. Mizzen gets all texts at once, in order of arrival. Runs alternate, so that other load on the
machine affects all, and medians are compared. Rates are in tokens of texts, without padding, per second and
per CPU-second of all threads; the latter hardly depend on other load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from mizzen import LLM

GOAL = 1.5
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a run; lengths are in tokens."""

    texts: int = 128
    batch: int = 32
    median: float = 60.0
    spread: float = 0.9
    longest: int = 512
    rounds: int = 3


def make_texts(workload: Workload, vocabulary: int) -> list[list[int]]:
    """Return texts as token ids, with lognormal lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(workload.median), workload.spread, workload.texts)
    return [
        rng.integers(1000, vocabulary, int(length)).tolist() for length in lengths.clip(4, workload.longest)
    ]


def make_model(folder: Path, layers: int) -> Any:
    """Create a BERT with random weights, save it to a folder, and return the model."""
    torch.manual_seed(0)
    config = transformers.BertConfig(num_hidden_layers=layers)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    return model


def embed_padded(model: Any, texts: list[list[int]], batch: int) -> np.ndarray:
    """Return the normalised means of the hidden states of texts, computed in padded batches."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    vectors: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    with torch.inference_mode():
        for begin in range(0, len(order), batch):
            indices = order[begin : begin + batch]
            longest = max(len(texts[index]) for index in indices)
            ids = torch.zeros(len(indices), longest, dtype=torch.int64)
            mask = torch.zeros(len(indices), longest, dtype=torch.int64)
            for row, index in enumerate(indices):
                ids[row, : len(texts[index])] = torch.tensor(texts[index])
                mask[row, : len(texts[index])] = 1
            states = model(ids, attention_mask=mask).last_hidden_state.float()
            means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            for index, vector in zip(indices, F.normalize(means, dim=-1), strict=True):
                vectors[index] = vector
    return torch.stack(vectors).numpy()


def measure(runs: dict[str, Callable[[], np.ndarray]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds and CPU-seconds of each run; the runs alternate."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            run()
            seconds[name].append((time.perf_counter() - begin, time.process_time() - cpu_begin))
    return {
        name: (statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times))
        for name, times in seconds.items()
    }


def compare(workload: Workload, threads: int, layers: int) -> dict[str, Any]:
    """Measure both programs in each dtype; return rates, ratios and the least cosine to float32."""
    torch.set_num_threads(threads)
    engines: dict[str, LLM] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {"float32": make_model(Path(folder), layers)}
        for dtype in DTYPES:
            engines[dtype] = LLM(folder, device="cpu", dtype=dtype, threads=threads, skip_tokenizer=True)
        models["bfloat16"] = transformers.BertModel.from_pretrained(
            folder, add_pooling_layer=False, dtype=torch.bfloat16
        ).eval()
    texts = make_texts(workload, models["float32"].config.vocab_size)
    runs: dict[str, Callable[[], np.ndarray]] = {}
    for dtype in DTYPES:
        runs[f"transformers {dtype}"] = lambda dtype=dtype: embed_padded(models[dtype], texts, workload.batch)
        runs[f"mizzen {dtype}"] = lambda dtype=dtype: engines[dtype].embed(texts, pooling="mean")
    expected = runs["transformers float32"]()
    cosines = {name: float((run() * expected).sum(1).min()) for name, run in runs.items()}
    seconds = measure(runs, workload.rounds)
    for engine in engines.values():
        engine.close()
    tokens = sum(map(len, texts))
    base, cpu_base = seconds["transformers float32"]
    return {
        "tokens": tokens,
        "rates": {name: tokens / wall for name, (wall, _) in seconds.items()},
        "cpu_rates": {name: tokens / cpu for name, (_, cpu) in seconds.items()},
        "ratios": {name: base / wall for name, (wall, _) in seconds.items()},
        "cpu_ratios": {name: cpu_base / cpu for name, (_, cpu) in seconds.items()},
        "cosines": cosines,
    }


def main() -> None:
    """Run the comparison and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of both programs")
    parser.add_argument("--texts", type=int, default=Workload().texts, help="number of texts")
    parser.add_argument("--rounds", type=int, default=Workload().rounds, help="runs of each program")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    workload = Workload(texts=options.texts, rounds=options.rounds)
    result = compare(workload, options.threads, options.layers)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{workload.texts} texts, {result['tokens']:,} tokens, {options.threads} threads")
    for name, rate in result["rates"].items():
        ratio, cosine = result["ratios"][name], result["cosines"][name]
        cpu_rate, cpu_ratio = result["cpu_rates"][name], result["cpu_ratios"][name]
        print(
            f"{name:>22}: {rate:7,.0f} tokens/s, {ratio:.2f}x; {cpu_rate:7,.0f} per CPU-second, "
            f"{cpu_ratio:.2f}x; least cosine to float32 {cosine:.5f}"
        )
    best = max(ratio for name, ratio in result["ratios"].items() if name.startswith("mizzen"))
    print(f"goal: {GOAL}x of Transformers in float32, {'reached' if best >= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
