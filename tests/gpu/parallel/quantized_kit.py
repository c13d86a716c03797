# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of a quantized checkpoint on one or several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mizzen import LLM, SamplingParams

LENGTHS = (2, 7, 64, 300)
"""Numbers of tokens of the prompts."""


def quantized_log_probabilities(folder: Path, ranks: int) -> list[np.ndarray]:
    """Return, for each prompt, the log probabilities of all tokens but its first, in bfloat16."""
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
    with LLM(folder, device="cuda", tensor=ranks, **settings) as llm:
        answers = llm.generate(prompts, params)
    return [np.array([entry.logprob for entry in answer.prompt_logprobs or []]) for answer in answers]
