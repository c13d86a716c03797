# SPDX-License-Identifier: Apache-2.0
"""Padding of captured graphs goes to no expert, changes no other row, and is not counted as load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.biases import ExpertBiases
from mizzen.layers.experts.held_experts import HeldExperts
from mizzen.layers.experts.products import GroupedProduct, MaskedProduct, SortedProduct
from mizzen.layers.experts.router import ExpertRouter
from mizzen.layers.sharding import Axis, Mesh
from mizzen.models.block import Activation
from mizzen.models.experts_config import ExpertsConfig, Scoring

NAN = float("nan")
EXPERTS = ExpertsConfig(count=9, per_token=2, width=8, layers=(True,))
BUILD = BuildContext(device=torch.device("cpu"), dtype=torch.float32)
LIVE = torch.tensor([True, True, False, True, False])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scoring", [Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SPARSEMIXER])
def test_routers_give_padding_no_expert(scoring: Scoring) -> None:
    router = ExpertRouter(
        BUILD, ExpertsConfig(count=9, per_token=2, width=8, layers=(True,), scoring=scoring), 16, ""
    )
    router.weight.copy_(random(9, 16))
    x = random(5, 16, seed=1)
    x[4] = NAN
    chosen, weights = router(x[:4])
    found, factors = router(x, LIVE)
    assert torch.equal(found[[0, 1, 3]], chosen[[0, 1, 3]])
    assert torch.equal(factors[[0, 1, 3]], weights[[0, 1, 3]])
    assert (found[~LIVE] == 9).all() and not factors[~LIVE].any()


def test_ranks_that_hold_other_experts_get_no_padding() -> None:
    mesh = Mesh(Axis(1, 3), expert_groups=3)
    held = HeldExperts(BuildContext(device=BUILD.device, dtype=BUILD.dtype, mesh=mesh), EXPERTS, 16, "")
    assert held.localize(torch.tensor([[0, 9], [5, 3], [6, 4]])).tolist() == [[3, 3], [2, 0], [3, 1]]


@pytest.mark.parametrize("live", [LIVE, torch.zeros(5, dtype=torch.bool)], ids=["some", "none"])
@pytest.mark.parametrize("kind", [SortedProduct, GroupedProduct, MaskedProduct])
def test_products_of_padding_are_zero(kind: Callable[..., Any], live: torch.Tensor) -> None:
    """Experts that only padding would choose, and the inputs of padding, hold NaN."""
    gate_up, down = random(9, 16, 16, seed=2), random(9, 16, 8, seed=3)
    biases = ExpertBiases(random(9, 16, seed=4), random(9, 16, seed=5))
    product = kind(gate_up, down, ActivationFunction(BUILD, Activation.SILU), biases)
    x, weights = random(5, 16, seed=6), random(5, 2, seed=7).abs()
    chosen = torch.tensor([[0, 1], [1, 2], [7, 8], [4, 0], [8, 3]])
    expected = product(x, chosen, weights) * live[:, None]
    for expert in set(range(9)) - set(chosen[live].flatten().tolist()):
        gate_up[expert], down[expert] = NAN, NAN
    padding = ~live[:, None]
    found = product(
        x.masked_fill(padding, NAN), chosen.masked_fill(padding, 9), weights.masked_fill(padding, 0)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class PaddedStep:
    """A decode step of five slots; the live ones are no padding."""

    def __init__(self, kit: SimpleNamespace, folder: Path, live: torch.Tensor | None) -> None:
        self.bench = kit.Bench(folder, expert_load="on")
        model = self.bench.model
        for slot in range(5):
            chunk = (slot, 0, kit.tokens(6 + slot, seed=slot), True)
            self.bench.logits(self.bench.plan([], [chunk], (kit.greedy(slot),)))
        self.load = model.expert_load
        self.load.counts.zero_()
        hidden = model.hidden

        def run_padded(tokens: Any, positions: Any, attend: Any, *arguments: Any, **options: Any) -> Any:
            attend.live = live
            return hidden(tokens, positions, attend, *arguments, **options)

        model.hidden = run_padded
        self.bench.state.last_tokens[:5] = torch.arange(20, 25)

    def run(self, rows: list[int] | None = None) -> torch.Tensor:
        """Return the logits of all slots, or of rows of the batch; -1 is padding."""
        plan = self.bench.plan([0, 1, 2, 3, 4], [])
        if rows is None:
            return self.bench.logits(plan)
        self.bench.state.write_pages(plan.pages)
        layout = BatchLayout.from_plan(plan, self.bench.state)
        return self.bench.model.logits(self.bench.step.forward(plan, layout, torch.tensor(rows)))

    def poison_unused(self) -> None:
        """Write NaN to all experts whose tokens have not been counted."""
        for counts, mixture in zip(self.load.counts, self.load.mixtures, strict=True):
            unused = (counts[: self.load.experts] == 0).nonzero().flatten()
            assert len(unused)
            mixture.weights.gate_up[unused], mixture.weights.down[unused] = NAN, NAN


@pytest.mark.parametrize(
    ("twin", "field"),
    [
        ("qwen3-moe", "num_experts"),
        ("glm4-moe", "n_routed_experts"),
        ("gpt-oss", "num_local_experts"),
        ("phi3.5-moe", "num_local_experts"),
    ],
)
@torch.inference_mode()
def test_padding_calls_no_expert_and_changes_no_other_row(
    twin: str, field: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """Experts that no live row has chosen hold NaN in the second run."""
    sizes = {
        "gpt-oss": "num_local_experts",
        "phi3.5-moe": "num_local_experts",
        "glm4-moe": "n_routed_experts",
    }
    kit.save_twin(tmp_path, twin, **{sizes.get(twin, "num_experts"): 16})
    expected = PaddedStep(kit, tmp_path, None).run()
    step = PaddedStep(kit, tmp_path, LIVE)
    torch.testing.assert_close(step.run()[LIVE], expected[LIVE], rtol=1e-5, atol=1e-5)
    counts, per_token = step.load.counts, step.bench.model.config.experts.per_token
    assert counts[:, :-2].sum(1).tolist() == [3 * per_token] * len(counts)
    assert counts[:, -2:].tolist() == [[0, 2 * per_token]] * len(counts), "no token is dropped"

    step = PaddedStep(kit, tmp_path, LIVE)
    step.run()
    step.poison_unused()
    step.bench.state.lengths[:5] -= 1
    again = step.run()
    torch.testing.assert_close(again[LIVE], expected[LIVE], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_rows_that_pad_a_graph_go_to_no_expert_of_the_last_layer(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    kit.save_twin(tmp_path, "qwen3-moe")
    expected = PaddedStep(kit, tmp_path, None).run()
    step = PaddedStep(kit, tmp_path, LIVE)
    found = step.run(rows=[3, 0, -1, -1])
    torch.testing.assert_close(found[:2], expected[[3, 0]], rtol=1e-5, atol=1e-5)
    counts = step.load.counts
    per_token = step.bench.model.config.experts.per_token
    assert counts[:, -2:].tolist() == [[0, 2 * per_token]] * len(counts)
    assert counts[-1, :-2].sum() == 2 * per_token
    assert all(mixture.live is None for mixture in step.load.mixtures)
