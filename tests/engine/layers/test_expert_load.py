# SPDX-License-Identifier: Apache-2.0
"""The tokens of each expert are counted, and the busiest expert of a layer is found, without waiting."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_kit import thread_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from mizzen.core.outputs import ExpertUse
from mizzen.core.request import Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine import expert_load
from mizzen.engine.expert_load import ExpertLoadReader
from mizzen.layers.experts.load import ExpertLoad

EXPERTS = 6
LAYERS = (1, 2, 4)


def make_load(*choices: list[list[int]], narrows: bool = True) -> tuple[ExpertLoad, list[Any]]:
    mixtures: list[Any] = [SimpleNamespace(chosen=torch.tensor(choice), live=None) for choice in choices]
    layers, device = LAYERS[: len(mixtures)], torch.device("cpu")
    return ExpertLoad(mixtures, layers, EXPERTS, device, last_layer_narrows=narrows), mixtures


def test_all_choices_are_counted_by_layer() -> None:
    load, mixtures = make_load([[0, 1], [1, 2]], [[5, 4], [5, 3]])
    load.add_step(narrowed=False)
    assert load.counts.tolist() == [[1, 2, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 2, 0, 0]]
    assert [mixture.chosen for mixture in mixtures] == [None, None]


def test_choices_of_no_expert_are_those_of_padding_or_drop_a_token() -> None:
    """In the first layer, token 2 is padding; token 1 lacks one of its experts. The last layer dropped all
    tokens but one."""
    load, mixtures = make_load([[0, 1], [1, EXPERTS], [EXPERTS, EXPERTS]], [[2, 5], [EXPERTS, EXPERTS]])
    mixtures[0].live = torch.tensor([True, True, False])
    mixtures[1].live = torch.tensor([True, False])
    load.add_step(narrowed=True)
    assert load.counts.tolist() == [[1, 2, 0, 0, 0, 0, 1, 2], [0, 0, 1, 0, 0, 1, 0, 2]]


def test_layers_before_the_last_keep_all_tokens() -> None:
    load, _ = make_load([[0, 1], [1, 2]], narrows=False)
    load.add_step(narrowed=True)
    assert load.counts.tolist() == [[1, 2, 1, 0, 0, 0, 0, 0]]


class Operations(TorchDispatchMode):
    """Counts the operations that PyTorch runs, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("layers", [3, 48])
def test_counting_costs_a_few_operations_in_each_step_and_reads_nothing_back(layers: int) -> None:
    mixtures: list[Any] = [
        SimpleNamespace(chosen=torch.zeros(4, 8, dtype=torch.int64), live=torch.ones(4, dtype=torch.bool))
        for _ in range(layers)
    ]
    load = ExpertLoad(mixtures, tuple(range(layers)), EXPERTS, torch.device("cpu"), last_layer_narrows=True)
    with Operations() as operations:
        load.add_step(narrowed=False)
    assert len(operations.names) <= 9, operations.names
    assert not any("item" in name or "local_scalar" in name for name in operations.names)


def test_ratios_are_those_of_periods_with_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "MIN_TOKENS", 2)
    load, _ = make_load([[0]], [[0]])
    load.counts += 1000  # warm-up
    reader = ExpertLoadReader(load)
    load.counts[:, 0] += 11
    assert reader.read(100.0).ratios == {}, "too few tokens"
    load.counts[:, 1] += 1
    assert reader.read(105.0).ratios == {}, "too soon"
    assert reader.read(110.0).ratios == {1: 5.5, 2: 5.5}
    load.counts[0, :EXPERTS] += 2
    load.counts[1, 5] += 12
    load.counts[:, -1] += 99  # padding
    assert reader.read(120.0).ratios == {1: 1.0, 2: 6.0}
    assert reader.read(130.0).ratios == {1: 1.0, 2: 6.0}, "no tokens since"
    assert reader.use.dropped == 0
    load.counts[1, EXPERTS] += 3
    assert reader.read(140.0) == ExpertUse(ratios={1: 1.0, 2: 6.0}, dropped=3)


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
        use = engine.expert_use(1.0)
        assert (reader.before.sum(1) - warm_up).tolist() == [2 * (45 + 4), 2 * (2 + 4)]
    assert use is not None and list(use.ratios) == [0, 2] and use.dropped == 0
    assert all(1 <= ratio <= 4 for ratio in use.ratios.values())


def test_tokens_are_only_counted_on_demand(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_twin(tmp_path, "qwen3-moe")
    with thread_ranks(tmp_path, 1) as engine:
        assert engine.expert_use(1.0) is None
