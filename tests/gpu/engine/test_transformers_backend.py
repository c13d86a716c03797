# SPDX-License-Identifier: Apache-2.0
"""Models that run through Transformers on a GPU: log probabilities equal those of Transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from logprob_check import SIZES, measure_errors

from family_twins import OTHERS, save_other_twin, save_twin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WITH_HEAD_DIM: dict[str, Any] = {**SIZES, "head_dim": 64}
GPT: dict[str, Any] = {"vocab_size": 512, "n_embd": 256, "n_head": 4, "n_inner": 512, "n_positions": 2048}
CHANGES: dict[str, dict[str, Any]] = {
    "GPT2": GPT,
    "GPTBigCode": GPT,
    "OPT": {"ffn_dim": 512, "word_embed_proj_dim": 256},
    "Cwm": {"sliding_window": 64},
    "Ministral": {"sliding_window": 64},
}


def check_answers(model: Any, folder: Path, **options: Any) -> None:
    errors = measure_errors(model, folder, **options)
    errors.check_means()
    if not hasattr(model.config, "num_experts_per_tok"):
        # A rounding error may choose another expert for a token, which changes a single value by much more.
        errors.check_maxima()


@pytest.mark.parametrize("fusion", ["auto", "off"])
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_llama_equals_transformers_and_the_native_model(graphs: str, fusion: str, tmp_path: Path) -> None:
    model = save_other_twin(tmp_path, "Llama", dtype=torch.bfloat16, **WITH_HEAD_DIM).cuda()
    for implementation in ("native", "transformers"):
        check_answers(model, tmp_path, cuda_graph=graphs, fusion=fusion, model_implementation=implementation)


@pytest.mark.parametrize("twin", ["gemma2", "olmo2"])
def test_native_twins_equal_transformers(twin: str, tmp_path: Path) -> None:
    window = {"sliding_window": 64} if twin == "gemma2" else {}
    model = save_twin(tmp_path, twin, dtype=torch.bfloat16, **WITH_HEAD_DIM, **window).cuda()
    check_answers(model, tmp_path, model_implementation="transformers")


@pytest.mark.parametrize("prefix", OTHERS)
def test_other_architectures_equal_transformers(prefix: str, tmp_path: Path) -> None:
    sizes = {} if prefix.startswith("GPT") and prefix != "GPTNeoX" else WITH_HEAD_DIM
    model = save_other_twin(tmp_path, prefix, dtype=torch.bfloat16, **sizes, **CHANGES.get(prefix, {})).cuda()
    check_answers(model, tmp_path)
