"""Which rows of a captured step are drawn again, and by what; plain operations stand for the kernels."""

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
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"top_p": 0.6},
    {"top_k": 7, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
    {"temperature": 0.0},
    {"min_p": 0.3, "presence_penalty": 0.7},
    {"frequency_penalty": 1.1},
]
MASKED: list[dict[str, Any]] = [
    {"grammar": JSON},
    {"grammar": JSON, "top_p": 0.7},
    {"grammar": JSON, "top_k": 4, "frequency_penalty": 1.3},
    {"grammar": JSON, "temperature": 0.0, "top_k": 4},
]


class Batch:
    """A state whose slots ask for these kinds, its logits, and what draws rows again."""

    def __init__(self, kinds: list[dict[str, Any]], bits: torch.Tensor) -> None:
        count = len(kinds)
        self.state = SlotState(count + 2, 4, UPLOAD, scratch_page=0, vocab=VOCAB)
        self.slots = np.random.default_rng(2).permutation(count + 2)[:count].astype(np.int64)
        starts = []
        for seed, (slot, kind) in enumerate(zip(self.slots.tolist(), kinds, strict=True)):
            known = np.random.default_rng(seed).integers(0, VOCAB, 60).astype(np.int32)
            asks = SlotOptions(tokens=known, prompt_tokens=20)
            starts.append(
                SlotStart(slot=slot, length=0, sampling=SamplingParams(**kind), seed=seed, options=asks)
            )
        self.state.start_slots(tuple(starts))
        self.masks: Any = SimpleNamespace(bits=lambda *_: bits, applied=lambda: None)
        self.state.logits_params.masks = self.masks

    def redraws(self, logits: torch.Tensor, position: int) -> Resampler:
        assert self.state.scratch_slot is not None
        replayed = ReplayBuffers(
            logits=logits,
            tokens=torch.full((len(logits),), -1),
            slots=torch.from_numpy(self.slots.astype(np.int32)),
            positions=torch.full((len(logits),), position, dtype=torch.int32),
        )
        penalties = GraphPenalties(self.state.logits_params, self.state.scratch_slot + 1)
        return Resampler(replayed, self.state, penalties, UPLOAD)

    def stand_in(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        last_tokens: torch.Tensor,
        bits: torch.Tensor | None,
        penalties: GraphPenalties,
    ) -> None:
        """Penalise rows whose place is below -1, mask, draw, count; one after the other."""
        for row in rows.tolist():
            slot, counts = int(slots[row]), self.state.logits_params.counts
            here, final, place = np.array([slot]), logits[[row]].float(), int(penalties.places[slot])
            assert place < 0, "the replay has penalised it"
            if place < -1:
                values = penalties.values[slot]
                each = dict(zip(("frequency", "presence", "repetition"), values[:, None], strict=True))
                asked = SimpleNamespace(rows=torch.tensor([0]), counts=torch.tensor([-2 - place]), **each)
                apply_penalties(final, asked, counts)  # type: ignore[arg-type]
            if bits is not None:
                apply_bitmask(final, torch.tensor([0]), torch.tensor([slot]), bits)
            if self.state.temperature.host[slot] > 0:
                tokens[row] = sample_random(final, self.state, here, np.array([int(positions[row])]), UPLOAD)[0]
            else:
                tokens[row] = final.argmax()
            last_tokens[slot] = tokens[row]
            if place < -1:
                counts.table[-2 - place, tokens[row]] += 1


@pytest.fixture
def bits() -> torch.Tensor:
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (20, -(-VOCAB // 32)), dtype=np.int64)
    return torch.from_numpy(words.astype(np.int32))


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "plain"])
@pytest.mark.parametrize("kinds", [KINDS, KINDS + MASKED[:1], KINDS + MASKED], ids=["free", "masks", "both"])
def test_rows_are_drawn_again_as_their_twin_draws_them(
    kinds: list[dict[str, Any]], kernel: bool, bits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mizzen.kernels.sampling import sample as sampling
    from mizzen.kernels.sampling import top_k_top_p

    plain, subject = Batch(kinds, bits), Batch(kinds, bits)
    asking = {row for row, kind in enumerate(kinds) if {"top_k", "top_p", "min_p"} & set(kind)}
    filtered = {row for row in asking if kinds[row].get("temperature") != 0.0}

    def sample_top_k_top_p(*given: Any) -> None:
        assert kernel
        logits, rows, slots, positions, parameters, tokens, last_tokens, bits, penalties = given
        assert parameters is subject.state.sampling_tensors
        subject.stand_in(logits, rows, slots, positions, tokens, last_tokens, bits, penalties)

    def sample_masked(*given: Any) -> None:
        logits, rows, slots, positions, _, _, tokens, last_tokens, bits, penalties = given
        assert not set(rows.tolist()) & filtered
        subject.stand_in(logits, rows, slots, positions, tokens, last_tokens, bits, penalties)

    monkeypatch.setattr(top_k_top_p, "sample_top_k_top_p", sample_top_k_top_p)
    monkeypatch.setattr(sampling, "sample_masked", sample_masked)
    for step in range(3):
        position = 60 + step
        logits = 3 * torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(step))
        positions = np.full(len(kinds), position)
        wanted = sample(logits.clone(), plain.state, plain.slots, positions, UPLOAD).tokens
        redraws = subject.redraws(logits, position)
        redraws.has_filter_kernel = kernel
        redraws.set_batch(subject.slots)
        extras = subject.state.logits_params.gather_batch(subject.slots, positions, redraws.graph_penalized)
        redraws.set_logits_params(extras)
        redraws.resample_filtered(subject.slots.astype(np.int32), positions.astype(np.int32))
        again = set(filtered)
        if extras is not None and redraws.only_masks:
            redraws.resample_masked(subject.masks, extras, positions)
            again |= set(extras.rows.tolist())
        elif extras is not None:
            again -= set(extras.rows.tolist())  # whoever processes their logits draws them
        tokens = redraws.buffers.tokens
        assert {row for row, token in enumerate(tokens.tolist()) if token >= 0} == again
        assert all(tokens[row] == wanted[row] for row in again)
        assert all(subject.state.last_tokens[subject.slots[row]] == wanted[row] for row in again)
        # All rows have drawn now, as far as penalties know.
        for row, kind in enumerate(kinds):
            if row not in again and any("penalty" in name for name in kind):
                place = subject.state.logits_params.counts.row_by_slot[subject.slots[row]]
                subject.state.logits_params.counts.table[place, wanted[row]] += 1
        # Without the kernel, the free rows with filters and penalties are processed, and so all others are.
        assert redraws.only_masks == (kernel and len(kinds) > len(KINDS))
