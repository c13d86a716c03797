# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests on several GPUs: models, requests, and calls in separate processes.

In PyTorch, only the first process group that a process creates can use peer memory; later ones use only NCCL.
Tests of peer memory therefore run in a process of their own, through `run_in_process`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grammar_kit as gk
import numpy as np
import pytest
import torch
from common_parts.shapes import SHAPES
from random_load import RandomLoad
from small_models import VOCABULARY

from mizzen import LLM, SamplingParams

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ONE_GPU = GPUS == 1 and torch.cuda.get_device_capability() == (9, 0)
"""Whether all ranks share the machine's only GPU; everything except NCCL can be tested that way."""
RANKS = [size for size in (2, 4, 8) if size <= GPUS or ONE_GPU]
several_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(not RANKS, reason="needs two CUDA devices, or one Hopper GPU for all ranks"),
]
with_nccl = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices: NCCL refuses two ranks on one")
if ONE_GPU:
    # All processes that are started from now on import one_gpu/sitecustomize.py.
    paths = [str(Path(__file__).parent / "one_gpu"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
APART_SECONDS = 240.0
"""Seconds after which a call in another process counts as hanging."""
SMALL: dict[str, Any] = {"skip_tokenizer": True, "kv_cache_tokens": 8192, "max_running_requests": 32}
Result = TypeVar("Result")


def run_in_process(work: Callable[..., Result], *args: Any, seconds: float = APART_SECONDS) -> Result:
    """Call `work(*args)` in a new process, and return its result.

    `work` must be defined at the top level of a module.

    Raises:
        TimeoutError: The call took longer than `seconds`; the process and its ranks were killed.
    """
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        return pool.submit(work, *args).result(seconds)
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown()


def random_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests of every kind: greedy, random, filtered, penalized, with log probabilities."""
    rng = np.random.default_rng(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0.9, "seed": 8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "seed": 9, "frequency_penalty": 0.6, "logprobs": 3},
        {"temperature": 0, "prompt_logprobs": 1},
    ]
    prompts = [rng.integers(3, VOCABULARY, int(rng.integers(1, 200))).tolist() for _ in range(count)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(count)]
    return prompts, params


def generated(model: Path, options: dict[str, Any]) -> list[list[int]]:
    """Return the output tokens of 12 random requests, computed in float32."""
    prompts, params = random_requests(12)
    with LLM(model, device="cuda", dtype="float32", **SMALL, **options) as llm:
        return [answer.token_ids for answer in llm.generate(prompts, params)]


def generated_twice(model: Path, options: dict[str, Any]) -> list[list[list[int]]]:
    """Return the results of `generated` for two groups that this process joins one after the other."""
    return [generated(model, options) for _ in range(2)]


def wide_model(folder: Path) -> Path:
    """Write a config.json with the layer shapes of Qwen3-8B but only four layers, for dummy weights."""
    (folder / "config.json").write_text(json.dumps({**SHAPES["qwen3-8b"], "num_hidden_layers": 4}))
    return folder


def small_model(folder: Path) -> Path:
    """Write the config.json of Qwen3-0.6B, for dummy weights, and a tokenizer of bytes, for grammars."""
    (folder / "config.json").write_text(json.dumps({**SHAPES["qwen3-0.6b"], "eos_token_id": gk.EOS}))
    gk.save_tokenizer(folder)
    return folder


def log_probabilities(model: Path, options: dict[str, Any]) -> list[np.ndarray]:
    """Return, for each prompt, the logprobs of all tokens but its first, in bfloat16 with dummy weights."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 150_000, length).tolist() for length in (2, 7, 64, 500, 1000)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    settings = {**SMALL, "kv_cache_tokens": 1 << 15, "load_format": "dummy"}
    if ONE_GPU:  # larger all-reduces use gloo instead of NCCL here, which cannot be captured
        settings["cuda_graph_max_tokens"] = 512
    with LLM(model, device="cuda", **settings, **options) as llm:
        answers = llm.generate(prompts, params)
    return [np.array([entry.logprob for entry in answer.prompt_logprobs or []]) for answer in answers]


def run_random_load(model: Path, ranks: int, seconds: float) -> dict[str, int]:
    """Run a random load with aborts on several ranks; return its counts, and the engine's load at the end."""
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer": True, "check_integrity": True}
    options |= {"kv_cache_tokens": 40_000, "max_running_requests": 64, "prefill_chunk_tokens": 1024}
    with LLM(model, device="cuda", tensor=ranks, **options) as llm:
        load = RandomLoad(llm.engine, seconds)
        while load.step():
            pass
        engine_load = llm.engine.load()
        return {
            "submitted": load.submitted,
            "ended": load.ended,
            "aborted": load.aborted,
            "errors": load.errors,
            "faults": llm.engine.integrity_faults,
            "running": engine_load.running,
            "waiting": engine_load.waiting,
            "pages": engine_load.pages_used,
        }
