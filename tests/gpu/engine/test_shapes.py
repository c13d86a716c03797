# SPDX-License-Identifier: Apache-2.0
"""Logits equal Transformers' on seeded random weights.

The models have the shapes of Qwen3-0.6B and Llama-3.2-1B, and a small shape of each family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models
import torch
import transformers
from common_parts.shapes import SHAPES

from mizzen.core.step_plan import PageWrites, PrefillChunk, StepPlan
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading import model_setup
from mizzen.engine.uploader import Uploader
from mizzen.models.registry import read_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3-0.6b": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama-3.2-1b": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}
LONG, SHORT, DECODES = 2048, 300, 3
"""Two prompt lengths in tokens, and the number of decodes; at LONG, GEMMs use the kernels for many rows."""
PAGE, SLOTS, COLUMNS = 16, 2, 132


def save(folder: Path, shape: str) -> Any:
    """Save a seeded random model; return the Transformers model, in float32 on the GPU."""
    config_class, model_class = FAMILIES[shape]
    values = {name: value for name, value in SHAPES[shape].items() if name not in ("architectures", "dtype")}
    torch.manual_seed(0)
    model = model_class(config_class(**values)).float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.normal_(1.0, 0.1)
    model.save_pretrained(folder)
    return model.cuda()


def shared_prefix_tokens(prompt: int) -> int:
    """Return the common prefix's length in tokens: 4/5 of a prompt, rounded down to full pages."""
    return prompt * 4 // 5 // PAGE * PAGE


def to_bfloat16(model: Any) -> Any:
    """Convert weights to bfloat16, but keep buffers: rotary frequencies would be too imprecise."""
    buffers = dict(model.named_buffers())
    model.bfloat16()
    for name, buffer in buffers.items():
        inside, _, last = name.rpartition(".")
        model.get_submodule(inside).register_buffer(last, buffer, persistent=False)
    return model


def oracle(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """Return Transformers' logits [tokens, vocab] for the same tokens as `own_logits`, in the same order."""
    prompt = len(rows[0]) - DECODES
    with torch.inference_mode():
        logits = [model(torch.tensor([row], device="cuda")).logits[0].float() for row in rows]
    return torch.cat([logits[0][:prompt], logits[1][shared_prefix_tokens(prompt) :]])


def own_logits(folder: Path, dtype: str, fusion: str, rows: list[list[int]]) -> torch.Tensor:
    """Return Mizzen's logits [tokens, vocab].

    The first prompt runs in two chunks. The second prompt starts after the pages that it shares with the
    first, and is followed by its decodes.
    """
    prompt = len(rows[0]) - DECODES
    options = EngineOptions(model=str(folder), device="cuda", dtype=dtype, fusion=fusion)
    with torch.inference_mode():
        model = model_setup.make_model(options, read_config(folder), lambda done, total: None)
        total = SLOTS * COLUMNS
        kind = "auto" if dtype == "bfloat16" else "reference"
        attention = model_setup.make_attention_with_kv(model, PAGE, total + 1, prefill=kind, decode=kind)
        upload = Uploader(torch.device("cuda"))
        state = SlotState(SLOTS, COLUMNS, upload, scratch_page=total)
        step = StepExecutor(model, attention, state, upload)
        table = np.random.default_rng(2).permutation(total).astype(np.int32).reshape(SLOTS, COLUMNS)
        table[1, : shared_prefix_tokens(prompt) // PAGE] = table[0, : shared_prefix_tokens(prompt) // PAGE]
        slots, columns = np.indices(table.shape, dtype=np.int32).reshape(2, -1)
        state.write_pages(PageWrites(slots, columns, table.reshape(-1)))
        results: list[torch.Tensor] = []

        def run(decode: list[int], *chunks: tuple[int, int, int]) -> None:
            prefill_chunks = [
                PrefillChunk(
                    slot=slot, start=begin, tokens=np.array(rows[slot][begin:end], np.int32), last=True
                )
                for slot, begin, end in chunks
            ]
            plan = StepPlan(
                step=len(results),
                decode=np.array(decode, np.int32),
                decode_version=len(results),
                pages=PageWrites(),
                prefill=tuple(prefill_chunks),
            )
            results.append(model.logits(step.forward(plan, BatchLayout.from_plan(plan, state))).float())

        run([], (0, 0, 128), (0, 128, prompt))
        run([], (1, shared_prefix_tokens(prompt), prompt))
        for index in range(DECODES):
            state.lengths[1] = prompt + index
            state.last_tokens[1] = rows[1][prompt + index]
            run([1])
    return torch.cat(results)


def check_tokens(actual: torch.Tensor, exact: torch.Tensor, strict_rows: int) -> None:
    """Check that the greedy tokens in the first `strict_rows` rows equal those of `exact`.

    In the other rows, they must be as probable as the best tokens, except for rounding.
    """
    chosen = actual.argmax(-1)
    assert torch.equal(chosen[:strict_rows], exact.argmax(-1)[:strict_rows])
    shortfall = exact.amax(-1) - exact.gather(-1, chosen[:, None])[:, 0]
    assert shortfall.max() < 1e-4 * exact.std()


def check(folder: Path, transformers_model: Any, vocabulary: int, prompt: int) -> None:
    """Compare the logits of the model in a folder with those of the Transformers model in float32."""
    draw = np.random.default_rng(1).integers(3, vocabulary, (2, prompt + DECODES))
    draw[1, : shared_prefix_tokens(prompt)] = draw[0, : shared_prefix_tokens(prompt)]
    rows = draw.tolist()
    exact = oracle(transformers_model, rows)
    plain = oracle(to_bfloat16(transformers_model), rows) - exact
    transformers_model.cpu()
    for fusion in ("off", "auto"):
        single = own_logits(folder, "float32", fusion, rows)
        assert (single - exact).norm() < 1e-4 * exact.norm()
        check_tokens(single, exact, len(exact) if prompt == SHORT else SHORT)
        half = own_logits(folder, "bfloat16", fusion, rows) - exact
        assert half.norm() < 1.2 * plain.norm() < 0.1 * exact.norm()


@pytest.fixture(autouse=True)
def disable_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("shape", FAMILIES)
def test_logits_equal_transformers(shape: str, tmp_path: Path) -> None:
    check(tmp_path, save(tmp_path, shape), 10_000, LONG)


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_logits_of_each_family_equal_transformers(family: str, tmp_path: Path) -> None:
    """The models have three layers, which run within seconds on any GPU."""
    check(tmp_path, small_models.save_model(tmp_path, family), small_models.VOCABULARY, SHORT)
