# SPDX-License-Identifier: Apache-2.0
"""Rows of a captured step are resampled after the replay; eager operations replace the kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mizzen.core.sampling_params import Grammar, GrammarKind, SamplingParams
from mizzen.core.step_plan import SlotOptions, SlotStart
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.sampling.graph_penalties import GraphPenalties
from mizzen.engine.sampling.graph_resample import ReplayBuffers, Resampler
from mizzen.engine.sampling.sampler import apply_bitmask, apply_penalties, sample, sample_random
from mizzen.engine.uploader import Uploader

pytest.importorskip("triton", reason="this PyTorch comes without Triton")

VOCAB = 90
UPLOAD = Uploader(torch.device("cpu"))
JSON = Grammar(GrammarKind.JSON_OBJECT)
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"top_p": 0.6},
    {"top_k": 7, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
    {"temperature": 0.0},
    {"min_p": 0.3, "presence_penalty": 0.7},
    {"frequency_penalty": 1.1},
]
MASKED_SAMPLING: list[dict[str, Any]] = [
    {"grammar": JSON},
    {"grammar": JSON, "top_p": 0.7},
    {"grammar": JSON, "top_k": 4, "frequency_penalty": 1.3},
    {"grammar": JSON, "temperature": 0.0, "top_k": 4},
]


class ResampleBatch:
    """Slots with the given sampling parameters, their logits, and a resampler over them."""

    def __init__(self, kinds: list[dict[str, Any]], mask_bits: torch.Tensor) -> None:
        count = len(kinds)
        self.state = SlotState(count + 2, 4, UPLOAD, scratch_page=0, vocab=VOCAB)
        self.slots = np.random.default_rng(2).permutation(count + 2)[:count].astype(np.int64)
        starts = []
        for seed, (slot, kind) in enumerate(zip(self.slots.tolist(), kinds, strict=True)):
            tokens = np.random.default_rng(seed).integers(0, VOCAB, 60).astype(np.int32)
            options = SlotOptions(tokens=tokens, prompt_tokens=20)
            starts.append(
                SlotStart(slot=slot, length=0, sampling=SamplingParams(**kind), seed=seed, options=options)
            )
        self.state.start_slots(tuple(starts))
        self.masks: Any = SimpleNamespace(update_bitmasks=lambda *_: mask_bits, mark_applied=lambda: None)
        self.state.logits_params.masks = self.masks

    def make_resampler(self, logits: torch.Tensor, position: int) -> Resampler:
        assert self.state.scratch_slot is not None
        buffers = ReplayBuffers(
            logits=logits,
            tokens=torch.full((len(logits),), -1),
            slots=torch.from_numpy(self.slots.astype(np.int32)),
            positions=torch.full((len(logits),), position, dtype=torch.int32),
        )
        penalties = GraphPenalties(self.state.logits_params, self.state.scratch_slot + 1)
        return Resampler(buffers, self.state, penalties, UPLOAD)

    def resample_eagerly(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        last_tokens: torch.Tensor,
        mask_bits: torch.Tensor | None,
        penalties: GraphPenalties,
    ) -> None:
        """Resample rows one by one: apply the penalties that the replay skipped, mask, sample and count.

        The replay skipped a row's penalties if the value of the row's slot in `penalties.count_rows` is
        below -1.
        """
        for row in rows.tolist():
            slot, counts = int(slots[row]), self.state.logits_params.counts
            slot_index, row_logits, place = (
                np.array([slot]),
                logits[[row]].float(),
                int(penalties.count_rows[slot]),
            )
            assert place < 0, "the replay has already applied the penalties of this row"
            if place < -1:
                values = penalties.values[slot]
                penalty_values = dict(
                    zip(("frequency", "presence", "repetition"), values[:, None], strict=True)
                )
                batch_penalties = SimpleNamespace(
                    rows=torch.tensor([0]), count_rows=torch.tensor([-2 - place]), **penalty_values
                )
                apply_penalties(row_logits, batch_penalties, counts)  # type: ignore[arg-type]
            if mask_bits is not None:
                apply_bitmask(row_logits, torch.tensor([0]), torch.tensor([slot]), mask_bits)
            if self.state.temperature.host[slot] > 0:
                tokens[row] = sample_random(
                    row_logits, self.state, slot_index, np.array([int(positions[row])]), UPLOAD
                )[0]
            else:
                tokens[row] = row_logits.argmax()
            last_tokens[slot] = tokens[row]
            if place < -1:
                counts.table[-2 - place, tokens[row]] += 1


@pytest.fixture
def mask_bits() -> torch.Tensor:
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (20, -(-VOCAB // 32)), dtype=np.int64)
    return torch.from_numpy(words.astype(np.int32))


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize(
    "kinds",
    [SAMPLING, SAMPLING + MASKED_SAMPLING[:1], SAMPLING + MASKED_SAMPLING],
    ids=["no masks", "one masked row", "several masked rows"],
)
def test_resampled_rows_equal_eager_sampling(
    kinds: list[dict[str, Any]], kernel: bool, mask_bits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mizzen.kernels.sampling import sample as sampling
    from mizzen.kernels.sampling import top_k_top_p

    reference, subject = ResampleBatch(kinds, mask_bits), ResampleBatch(kinds, mask_bits)
    rows_with_filters = {row for row, kind in enumerate(kinds) if {"top_k", "top_p", "min_p"} & set(kind)}
    resampled_by_filters = {row for row in rows_with_filters if kinds[row].get("temperature") != 0.0}

    def sample_top_k_top_p(*args: Any) -> None:
        assert kernel
        logits, rows, slots, positions, parameters, tokens, last_tokens, mask_bits, penalties = args
        assert parameters is subject.state.sampling_tensors
        subject.resample_eagerly(logits, rows, slots, positions, tokens, last_tokens, mask_bits, penalties)

    def sample_masked(*args: Any) -> None:
        logits, rows, slots, positions, _, _, tokens, last_tokens, mask_bits, penalties = args
        assert not set(rows.tolist()) & resampled_by_filters
        subject.resample_eagerly(logits, rows, slots, positions, tokens, last_tokens, mask_bits, penalties)

    monkeypatch.setattr(top_k_top_p, "sample_top_k_top_p", sample_top_k_top_p)
    monkeypatch.setattr(sampling, "sample_masked", sample_masked)
    for step in range(3):
        position = 60 + step
        logits = 3 * torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(step))
        positions = np.full(len(kinds), position)
        expected = sample(logits.clone(), reference.state, reference.slots, positions, UPLOAD).tokens
        resampler = subject.make_resampler(logits, position)
        resampler.has_filter_kernel = kernel
        resampler.set_batch(subject.slots)
        params = subject.state.logits_params.gather_batch(
            subject.slots, positions, resampler.rows_with_graph_penalties
        )
        resampler.set_logits_params(params)
        resampler.resample_filtered(subject.slots.astype(np.int32), positions.astype(np.int32))
        rerun = set(resampled_by_filters)
        if params is not None and resampler.only_masks:
            resampler.resample_masked(subject.masks, params, positions)
            rerun |= set(params.rows.tolist())
        elif params is not None:
            rerun -= set(params.rows.tolist())  # sampled together with the processing of their logits
        tokens = resampler.buffers.tokens
        assert {row for row, token in enumerate(tokens.tolist()) if token >= 0} == rerun
        assert all(tokens[row] == expected[row] for row in rerun)
        assert all(subject.state.last_tokens[subject.slots[row]] == expected[row] for row in rerun)
        # Count the tokens of the rows that the replay itself would have sampled.
        for row, kind in enumerate(kinds):
            if row not in rerun and any("penalty" in name for name in kind):
                place = subject.state.logits_params.counts.row_by_slot[subject.slots[row]]
                subject.state.logits_params.counts.table[place, expected[row]] += 1
        # Without the kernel, rows with filters and penalties need processed logits, in addition to masks.
        assert resampler.only_masks == (kernel and len(kinds) > len(SAMPLING))
