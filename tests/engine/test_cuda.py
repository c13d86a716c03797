# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU samples the same tokens as on the CPU, in float32."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mizzen import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_float32_gpu_answers_equal_cpu_answers(family: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    changes = {"sliding_window": 20} if family == "mistral" else {}
    kit.save_model(tmp_path, family, **changes)
    prompts = [kit.tokens(n, seed=n).tolist() for n in (1, 9, 70, 33, 70, 100)]
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1, seed=5, max_tokens=20),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.9, seed=6, max_tokens=20),
        SamplingParams(temperature=1.1, min_p=0.1, seed=7, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0.5, top_p=0.5, seed=9, max_tokens=20),
    ]
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(
            tmp_path,
            device=device,
            dtype="float32",
            skip_tokenizer=True,
            page_size=4,
            kv_cache_tokens=2048,
            prefill_chunk_tokens=48,
            max_running_requests=4,
        ) as llm:
            answers.append([llm.generate(prompts, params), llm.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_bfloat16_kv_cache_fills_the_memory_fraction(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "qwen3")
    with LLM(tmp_path, device="cuda", dtype="bfloat16", skip_tokenizer=True, memory_fraction=0.5) as llm:
        info = llm.engine.info
        total = torch.cuda.mem_get_info()[1]
        assert 0.3 * total < info.kv_bytes < 0.5 * total
        answers = llm.generate([[5, 6, 7]] * 40, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
