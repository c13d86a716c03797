"""Products that are added to the residual stream as they end give what the sum behind them does."""

from __future__ import annotations

import pytest
import torch

from mizzen.layers.build import Build
from mizzen.layers.linear import FEWEST_ADDED, InputSplitLinear


class Pair:
    """The first of two ranks, as far as layers ask."""

    size, rank = 2, 0


def layer(*, bias: bool = False, fused: bool = True, **build: object) -> InputSplitLinear:
    made = Build(device=torch.device("cpu"), dtype=torch.float64, fused=fused, **build)  # type: ignore[arg-type]
    found = InputSplitLinear(made, "down_proj", 24, 40, bias)
    generator = torch.Generator().manual_seed(0)
    found.method.weight.normal_(generator=generator)  # type: ignore[attr-defined]
    return found


def test_many_rows_are_added_in_place_and_few_are_not() -> None:
    down = layer()
    for count in (1, FEWEST_ADDED - 1, FEWEST_ADDED, FEWEST_ADDED + 7):
        x, residual = torch.randn(count, 40, dtype=torch.float64), torch.randn(count, 24, dtype=torch.float64)
        wanted, before = residual + down(x), residual.clone()
        term = down.onto(residual, x)
        if count < FEWEST_ADDED:
            assert term is not None and torch.equal(residual, before)
            residual = residual + term
        else:
            assert term is None
        torch.testing.assert_close(residual, wanted)


@pytest.mark.parametrize(
    "how", [{"bias": True}, {"fused": False}, {"ranks": Pair()}], ids=["bias", "plain", "ranks"]
)
def test_what_several_ranks_or_a_bias_or_the_plain_twin_give_stays_a_term(how: dict[str, object]) -> None:
    down = layer(**how)  # type: ignore[arg-type]
    residual = torch.zeros(2 * FEWEST_ADDED, 24, dtype=torch.float64)
    term = down.onto(residual, torch.ones(2 * FEWEST_ADDED, 40, dtype=torch.float64))
    assert term is not None and term.shape == residual.shape
    assert not residual.any()
