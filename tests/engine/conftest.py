# SPDX-License-Identifier: Apache-2.0
"""Small random models created by Transformers, and a bench that runs single steps of the engine's model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from family_twins import SMALL, save_twin
from mizzen.attention.base import MixedAttention
from mizzen.core.request import Int32
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotStart, StepPlan
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading.model_setup import inspect_config, make_attention_with_kv, make_model
from mizzen.engine.uploader import Uploader
from mizzen.models.registry import read_config

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))  # the reference implementations

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def save_model(folder: Path, family: str, *, shard: str = "1GB", seed: int = 0, **changes: Any) -> Any:
    """Save a seeded random model of a family to a folder; return the Transformers model, in float32."""
    config_class, model_class = FAMILIES[family]
    values = {**SMALL, **changes}
    if family == "mistral":
        values.setdefault("sliding_window", None)
    torch.manual_seed(seed)
    model = model_class(config_class(**values)).float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            # Large enough that tokens differ clearly; norms and biases away from their defaults.
            weights.normal_(1.0 if "norm" in name else 0.0, 0.25)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


class ModelBench:
    """A model with its paged KV cache; a test runs single steps, and slots get pages in random order."""

    def __init__(
        self,
        folder: Path,
        backend: str = "reference",
        page_size: int = 4,
        pages: int = 256,
        **changes: Any,
    ) -> None:
        options = EngineOptions(model=str(folder), device="cpu", page_size=page_size, **changes)
        config = inspect_config(options, read_config(folder, options.model_implementation))
        self.page_size = page_size
        self.model = make_model(options, config, lambda done, total: None)
        self.attention: MixedAttention = make_attention_with_kv(
            self.model, page_size, pages, prefill=backend, decode=backend
        )
        self.upload = Uploader(torch.device("cpu"))
        has_rotary_offsets = config.vision is not None and config.rope.has_sections
        self.state = SlotState(16, 64, self.upload, has_rotary_offsets=has_rotary_offsets)
        self.step = StepExecutor(self.model, self.attention, self.state, self.upload)
        self.free = list(np.random.default_rng(7).permutation(pages))
        self.held: dict[int, list[int]] = {}
        self.steps = 0

    def reserve(self, slot: int, tokens: int) -> PageWrites:
        """Allocate the pages that a slot lacks for `tokens` tokens; return the writes to the page table."""
        retained = self.held.setdefault(slot, [])
        first = len(retained)
        while len(retained) * self.page_size < tokens:
            retained.append(int(self.free.pop()))
        columns = np.arange(first, len(retained), dtype=np.int32)
        return PageWrites(
            np.full(len(columns), slot, np.int32), columns, np.array(retained[first:], np.int32)
        )

    def share(self, source: int, slot: int, tokens: int) -> PageWrites:
        """Start `slot` with pages of the slot `source`, as the prefix cache does.

        The pages are the full pages of the first `tokens` tokens. Return the writes to the page table.
        """
        pages = self.held[source][: tokens // self.page_size]
        self.held[slot] = list(pages)
        count = len(pages)
        return PageWrites(
            np.full(count, slot, np.int32), np.arange(count, dtype=np.int32), np.array(pages, np.int32)
        )

    def plan(
        self,
        decode: list[int],
        chunks: list[tuple[int, int, Int32, bool]],
        starts: tuple[SlotStart, ...] = (),
        shared: tuple[PageWrites, ...] = (),
    ) -> StepPlan:
        """Return the plan of a step; pages that its slots lack are allocated."""
        self.steps += 1
        writes = [*shared]
        writes += [self.reserve(slot, int(self.state.lengths[slot]) + 1) for slot in decode]
        writes += [self.reserve(slot, start + len(tokens)) for slot, start, tokens, _ in chunks]
        pages = PageWrites(
            *(np.concatenate([getattr(w, name) for w in writes]) for name in ("slots", "columns", "pages"))
        )
        return StepPlan(
            step=self.steps,
            decode=np.array(decode, np.int32),
            decode_version=self.steps,
            pages=pages,
            starts=starts,
            prefill=tuple(PrefillChunk(slot=s, start=b, tokens=t, last=e) for s, b, t, e in chunks),
        )

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run a plan; return the logits of every token, [tokens, vocab], decodes first."""
        with torch.inference_mode():
            self.state.write_pages(plan.pages)
            self.state.start_slots(plan.starts)
            self.step.prepare_replay(plan)
            layout = BatchLayout.from_plan(plan, self.state)
            logits = self.model.logits(self.step.forward(plan, layout))
            for chunk in plan.prefill:
                self.state.lengths[chunk.slot] = chunk.start + len(chunk.tokens)
            self.state.lengths[plan.decode] += 1
            return logits


def greedy(slot: int, length: int = 0) -> SlotStart:
    """Return the start of a slot that samples greedily."""
    return SlotStart(slot=slot, length=length, sampling=SamplingParams(temperature=0), seed=0)


def tokens(count: int, seed: int = 0, vocab: int = 160) -> Int32:
    """Return a seeded random prompt."""
    return np.random.default_rng(seed).integers(3, vocab, count).astype(np.int32)


def oracle(model: Any, prompt: Int32) -> torch.Tensor:
    """Return Transformers' logits of a whole prompt, [tokens, vocab]."""
    with torch.inference_mode():
        return model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0]


@pytest.fixture
def kit() -> SimpleNamespace:
    """Return this file's helpers, because tests cannot import a conftest."""
    return SimpleNamespace(
        save_model=save_model,
        save_twin=save_twin,
        Bench=ModelBench,
        greedy=greedy,
        tokens=tokens,
        oracle=oracle,
        families=list(FAMILIES),
    )
