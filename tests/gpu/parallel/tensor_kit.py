"""Shared by tests on several GPUs: models, requests, and work in separate processes.

PyTorch lets a process use peer memory with one group only, and a second group uses NCCL alone: whatever is
to be tried over peer memory runs through `apart`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from common_parts.shapes import SHAPES
from random_load import RandomLoad
from small_models import VOCABULARY

from mizzen import LLM, SamplingParams

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ONE_GPU = GPUS == 1 and torch.cuda.get_device_capability() == (9, 0)
"""Whether all ranks share the machine's only GPU, which tests everything but NCCL."""
RANKS = [size for size in (2, 4, 8) if size <= GPUS or ONE_GPU]
several_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(not RANKS, reason="needs two CUDA devices, or one Hopper GPU for all ranks"),
]
with_nccl = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices: NCCL refuses two ranks on one")
if ONE_GPU:
    # Of all processes that are started from here on; see the file in that folder.
    paths = [str(Path(__file__).parent / "one_gpu"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
APART_SECONDS = 240.0
"""Time after which a call counts as hanging."""
SMALL: dict[str, Any] = {"skip_tokenizer": True, "kv_cache_tokens": 8192, "max_running_requests": 32}
Given = TypeVar("Given")


def apart(work: Callable[..., Given], *args: Any, seconds: float = APART_SECONDS) -> Given:
    """Call a function of a module in a process of its own, and return its result.

    Raises:
        TimeoutError: It took longer than `seconds`; it was killed, and its ranks with it.
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
    """Return the tokens of each request, in float32."""
    prompts, params = random_requests(12)
    with LLM(model, device="cuda", dtype="float32", **SMALL, **options) as llm:
        return [answer.token_ids for answer in llm.generate(prompts, params)]


def generated_twice(model: Path, options: dict[str, Any]) -> list[list[list[int]]]:
    """Return the result of `generated` for two groups of this process, one after the other."""
    return [generated(model, options) for _ in range(2)]


def wide_model(folder: Path) -> Path:
    """Write a config.json as wide as Qwen3-8B with four layers, for dummy weights."""
    (folder / "config.json").write_text(json.dumps({**SHAPES["qwen3-8b"], "num_hidden_layers": 4}))
    return folder


def whole_model(folder: Path) -> Path:
    """Write the config.json of Qwen3-0.6B, for dummy weights."""
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    return folder


def log_probabilities(model: Path, options: dict[str, Any]) -> list[np.ndarray]:
    """Return the log probability of each prompt token but the first: bfloat16, dummy weights."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 150_000, length).tolist() for length in (2, 7, 64, 500, 1000)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    settings = {**SMALL, "kv_cache_tokens": 1 << 15, "load_format": "dummy"}
    if ONE_GPU:  # sums of more tokens go by NCCL, whose stand-in no graph can hold
        settings["cuda_graph_max_tokens"] = 512
    with LLM(model, device="cuda", **settings, **options) as llm:
        answers = llm.generate(prompts, params)
    return [np.array([entry.logprob for entry in answer.prompt_logprobs or []]) for answer in answers]


def loaded(model: Path, ranks: int, seconds: float) -> dict[str, int]:
    """Put a random load with aborts on several ranks; return its outcome."""
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer": True, "check_integrity": True}
    options |= {"kv_cache_tokens": 40_000, "max_running_requests": 64, "prefill_chunk_tokens": 1024}
    with LLM(model, device="cuda", tensor=ranks, **options) as llm:
        load = RandomLoad(llm.engine, seconds)
        while load.step():
            pass
        left = llm.engine.load()
        return {
            "sent": load.sent,
            "ended": load.ended,
            "aborted": load.aborted,
            "errors": load.errors,
            "faults": llm.engine.integrity_faults,
            "running": left.running,
            "waiting": left.waiting,
            "pages": left.pages_used,
        }
