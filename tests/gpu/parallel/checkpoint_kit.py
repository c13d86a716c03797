# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of a checkpoint on one or several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mizzen import LLM, SamplingParams

LENGTHS = (2, 7, 64, 300)
"""Numbers of tokens of the prompts."""


def checkpoint_log_probabilities(folder: Path, ranks: int, expert: int | None = None) -> list[np.ndarray]:
    """Return, for each prompt, the log probabilities of all tokens but its first, in bfloat16.

    Args:
        folder: The checkpoint.
        ranks: Number of ranks.
        expert: Number of groups of ranks that hold different experts of a mixture; derived by default.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 500, length).tolist() for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    settings: dict[str, Any] = {
        "skip_tokenizer": True,
        "kv_cache_tokens": 8192,
        "max_running_requests": len(LENGTHS),
        # On one GPU, larger all-reduces use gloo instead of NCCL, which cannot be captured.
        "cuda_graph_max_tokens": 64,
    }
    with LLM(folder, device="cuda", dtype="bfloat16", tensor=ranks, expert=expert, **settings) as llm:
        answers = llm.generate(prompts, params)
    return [np.array([entry.logprob for entry in answer.prompt_logprobs or []]) for answer in answers]
