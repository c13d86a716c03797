# SPDX-License-Identifier: Apache-2.0
"""The tokens of each expert are counted, and the busiest expert of a layer is found, without waiting."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_kit import thread_ranks

from mizzen.core.request import Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine import expert_load
from mizzen.engine.expert_load import ExpertLoadReader
from mizzen.layers.experts.load import ExpertLoad

EXPERTS = 6
LAYERS = (1, 2, 4)


def make_load(*choices: list[list[int]], narrows: bool = True) -> tuple[ExpertLoad, list[Any]]:
    mixtures: list[Any] = [SimpleNamespace(chosen=torch.tensor(choice)) for choice in choices]
    layers, device = LAYERS[: len(mixtures)], torch.device("cpu")
    return ExpertLoad(mixtures, layers, EXPERTS, device, last_layer_narrows=narrows), mixtures


def attend(real: list[bool] | None = None) -> Any:
    """Return the attention of a step; with `real`, of a step on a GPU whose other tokens are padding."""
    slots = torch.tensor([3 if is_real else 100 for is_real in real or []])
    kv = SimpleNamespace(keys=torch.empty(1, 116), page_size=16)
    return SimpleNamespace(slot_mapping=SlotsOnGpu(slots) if real else slots, kv=kv)


class SlotsOnGpu:
    """KV slots that claim to be on a GPU, where batches have padding."""

    is_cuda = True

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots

    def __lt__(self, limit: int) -> torch.Tensor:
        return self.slots < limit


def test_all_choices_are_counted_by_layer() -> None:
    load, mixtures = make_load([[0, 1], [1, 2]], [[5, 4], [5, 3]])
    load.add_step(attend(), None)
    assert load.counts.tolist() == [[1, 2, 1, 0, 0, 0], [0, 0, 0, 1, 1, 2]]
    assert [mixture.chosen for mixture in mixtures] == [None, None]


def test_padding_and_tokens_that_the_last_layer_drops_are_not_counted() -> None:
    """The last layer continued with tokens 1 and 3. Token 3 is padding."""
    load, _ = make_load([[0, 1], [1, 2], [1, 3], [4, 5]], [[2, 5], [0, 0]])
    load.add_step(attend(real=[True, True, True, False]), torch.tensor([1, 3]))
    assert load.counts.tolist() == [[1, 3, 1, 1, 0, 0], [0, 0, 1, 0, 0, 1]]
    load, _ = make_load([[2, 5], [0, 0]])
    load.add_step(attend(real=[True, True, True, False]), torch.tensor([1, 3]))
    assert load.counts.tolist() == [[0, 0, 1, 0, 0, 1]], "the only layer with experts is the last layer"


def test_rows_that_pad_a_graph_are_not_counted() -> None:
    """Only the choice of token 2 counts in the last layer; the other rows repeat token 0."""
    tokens = [[0, 1], [1, 2], [1, 3], [4, 5]]
    load, _ = make_load(tokens, [[2, 5], [0, 1], [0, 1], [0, 1]])
    load.add_step(attend(real=[True, True, True, False]), torch.tensor([2, 0, 0, 0]))
    assert load.counts.tolist() == [[1, 3, 1, 1, 0, 0], [0, 0, 1, 0, 0, 1]]


def test_layers_before_the_last_keep_all_tokens() -> None:
    load, _ = make_load([[0, 1], [1, 2]], narrows=False)
    load.add_step(attend(), torch.tensor([1, 0]))
    assert load.counts.tolist() == [[1, 2, 1, 0, 0, 0]]


def test_ratios_are_those_of_periods_with_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "MIN_TOKENS", 2)
    load, _ = make_load([[0]], [[0]])
    load.counts += 1000  # warm-up
    reader = ExpertLoadReader(load)
    load.counts[:, 0] += 11
    assert reader.read(100.0) == {}, "too few tokens"
    load.counts[:, 1] += 1
    assert reader.read(105.0) == {}, "too soon"
    assert reader.read(110.0) == {1: 5.5, 2: 5.5}
    load.counts[0] += 2
    load.counts[1, 5] += 12
    assert reader.read(120.0) == {1: 1.0, 2: 6.0}
    assert reader.read(130.0) == {1: 1.0, 2: 6.0}, "no tokens since"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_counts_every_token_once(
    ranks: int, kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer runs only the last token of each of the two chunks of the prompt."""
    monkeypatch.setattr(expert_load, "READ_SECONDS", 0.0)
    monkeypatch.setattr(expert_load, "MIN_TOKENS", 1e-9)
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    kit.save_twin(tmp_path, "qwen3-moe", **sizes)
    with thread_ranks(tmp_path, ranks, prefill_chunk_tokens=32, expert_load="on") as engine:
        reader: Any = engine._expert_load  # pyright: ignore[reportPrivateUsage]
        warm_up = reader.before.sum(1)
        sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        engine.submit(Request(rid=0, prompt=kit.tokens(45), sampling=sampling))
        while engine.busy:
            engine.step(0.0)
        ratios = engine.expert_load(1.0)
        assert (reader.before.sum(1) - warm_up).tolist() == [2 * (45 + 4), 2 * (2 + 4)]
    assert list(ratios) == [0, 2]
    assert all(1 <= ratio <= 4 for ratio in ratios.values())


def test_tokens_are_only_counted_on_demand(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_twin(tmp_path, "qwen3-moe")
    with thread_ranks(tmp_path, 1) as engine:
        assert engine.expert_load(1.0) == {}
