# SPDX-License-Identifier: Apache-2.0
"""Rows that pad the batch of a captured graph are counted for no expert, and no token is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hopper import FA3_FAULT
from logprob_check import SIZES

from family_twins import save_twin
from mizzen.core.request import Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine import expert_load
from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.loader import load_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS, TOKENS = (45, 7, 20), 12


NEEDS_FA3 = pytest.mark.skipif(
    FA3_FAULT is not None, reason=f"attention sinks need FlashAttention 3: {FA3_FAULT}"
)
"""Mark of families whose steps run as graphs only with FlashAttention 3."""


@pytest.mark.parametrize("twin", ["qwen3-moe", pytest.param("gpt-oss", marks=NEEDS_FA3)])
def test_only_tokens_are_counted(twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests run in graphs of four rows, and their prompts in larger graphs."""
    monkeypatch.setattr(expert_load, "READ_SECONDS", 0.0)
    head_dim = {} if twin == "gpt-oss" else {"head_dim": 64}
    save_twin(tmp_path, twin, dtype=torch.bfloat16, **SIZES, **head_dim)
    options = EngineOptions(
        model=str(tmp_path), device="cuda", kv_cache_tokens=4096, max_running_requests=8, expert_load="on"
    )
    engine = load_engine(options)
    try:
        reader: Any = engine._expert_load  # pyright: ignore[reportPrivateUsage]
        start = reader.load.counts.clone()
        for rid, length in enumerate(LENGTHS):
            prompt = np.random.default_rng(rid).integers(3, 150, length).astype(np.int32)
            sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
            engine.submit(Request(rid=rid, prompt=prompt, sampling=sampling))
        while engine.busy:
            engine.step(0.0)
        torch.cuda.synchronize()
        counts = (reader.load.counts - start).cpu()
        per_token = reader.load.mixtures[0].router.config.per_token
        expected = per_token * (sum(LENGTHS) + len(LENGTHS) * (TOKENS - 1))
        assert counts[0, :-2].sum() == expected
        assert not counts[:, -2].any(), "no token is dropped"
        assert (counts[:, -1] > 0).all(), "the graphs were padded"
    finally:
        engine.close()
