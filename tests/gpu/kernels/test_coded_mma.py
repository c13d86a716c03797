# SPDX-License-Identifier: Apache-2.0
"""Small batches times quantized experts equal plain loops, whatever unused memory holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mizzen.kernels.experts.coded_mma import CodedMmaTile
from mizzen.kernels.experts.coded_wgmma import CodedWgmmaTile
from mizzen.kernels.experts.few_mma import FewMmaTile
from mizzen.layers.activation import ActivationFunction, ClampedSwiGLU
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.biases import ExpertBiases
from mizzen.layers.experts.coded_kernel_plans import CODED_PLANS
from mizzen.layers.experts.coded_kernel_product import CodedKernelProduct
from mizzen.layers.experts.kernel_plans import CodedMma, CodedWgmma, FewMma, SmallBatch
from mizzen.layers.quantized.canonical import Codes
from mizzen.models.block import Activation
from random_weights import make_experts, sum_by_loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
    pytest.mark.usefixtures("poisoned_buffers"),
]
EXPERTS, PER_TOKEN = 5, 2
SIZES = {
    "e2m1": (1984, 1312),
    "uint4": (1408, 1280),
    "uint4-zeros": (640, 128),
    "e4m3": (1472, 1344),
    "e4m3-rows": (1472, 1344),
}
"""Hidden size and width by format; the columns of most end within a block of 128, and stages in shared memory
are used more than once."""
KINDS: dict[str, dict[str, Any]] = {
    "e2m1": {"codes": Codes.E2M1},
    "uint4": {"codes": Codes.UINT4, "column_step": 128, "dtype": torch.bfloat16},
    "uint4-zeros": {"codes": Codes.UINT4, "column_step": 128, "zeros": True, "dtype": torch.float16},
    "e4m3": {"codes": Codes.E4M3, "row_step": 64, "column_step": 128},
    "e4m3-rows": {"codes": Codes.E4M3, "dtype": torch.bfloat16},
}
PLANNED: dict[Codes, dict[str, CodedMma | FewMma]] = {
    format_.codes: {str(tiles): tiles for _, tiles in plan.coded_mma} for format_, plan in CODED_PLANS.items()
}
TILES: dict[str, CodedMma | FewMma] = {
    "one": CodedMma(CodedMmaTile(1, 1, 2, 2, 2, 3, 2), CodedMmaTile(1, 2, 1, 4, 1, 2, 2)),
    "four": CodedMma(CodedMmaTile(4, 2, 4, 1, 2, 3, 2), CodedMmaTile(3, 2, 8, 1, 2, 2, 1)),
    "eight": CodedMma(CodedMmaTile(8, 1, 4, 1, 4, 2, 2), CodedMmaTile(8, 1, 2, 1, 1, 4, 2)),
    "tiles": CodedMma(CodedMmaTile(2, 1, 4, 1, 2, 2, 4), CodedMmaTile(1, 1, 4, 1, 1, 3, 3, 4)),
    "few": FewMma(FewMmaTile(6, 8, 4, 1), FewMmaTile(1, 8, 9, 1)),
    "few parts": FewMma(FewMmaTile(3, 4, 2, 1), FewMmaTile(2, 6, 3, 1)),
    "wgmma-one": CodedWgmma(CodedWgmmaTile(1, 3, 3, 2)),
    "wgmma-eight": CodedWgmma(CodedWgmmaTile(8, 2, 2, 2)),
}


def supports(kind: str, tiles: SmallBatch) -> bool:
    """Return whether the kernel of a variant supports a format: two of them support one each."""
    if isinstance(tiles, CodedWgmma):
        return kind == "e2m1"
    return "e4m3" in kind or isinstance(tiles, CodedMma)


VARIANTS = [
    (kind, name)
    for kind in SIZES
    for name, tiles in (PLANNED[KINDS[kind]["codes"]] | TILES).items()
    if supports(kind, tiles)
]
for tiles_ in PLANNED.values():
    TILES |= tiles_


def normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)


class Weights:
    """Loaded weights of a mixture, with biases or none."""

    def __init__(self, kind: str, *, biased: bool = False) -> None:
        self.hidden, self.width = SIZES[kind]
        cuda = torch.device("cuda")
        self.gate_up = make_experts(EXPERTS, 2 * self.width, self.hidden, cuda, **KINDS[kind])
        self.down = make_experts(EXPERTS, self.hidden, self.width, cuda, **KINDS[kind])
        self.biases: ExpertBiases | None = None
        self.dtype = torch.bfloat16
        if biased:
            gate_up = normal(EXPERTS, 2 * self.width, seed=1)
            self.biases = ExpertBiases(gate_up, normal(EXPERTS, self.hidden, seed=2))


def choose(tokens: int) -> torch.Tensor:
    """Return experts of tokens, int64 [tokens, PER_TOKEN]; EXPERTS is an expert of another rank."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, EXPERTS + 1, generator=generator).argsort(1)[:, :PER_TOKEN]
    return chosen.contiguous().cuda()


def run(
    weights: Any,
    gate: Any,
    tiles: SmallBatch,
    x: torch.Tensor,
    chosen: torch.Tensor,
    factors: torch.Tensor,
) -> torch.Tensor:
    library: Any = None
    plan: Any = None
    product = CodedKernelProduct(weights, gate, library, experts=EXPERTS, plan=plan)
    assert product.supports_coded_mma
    assert product.supports_coded_wgmma or not isinstance(tiles, CodedWgmma)
    return product.run(x, chosen, factors, added=x, variant=tiles)


def silu() -> ActivationFunction:
    build = BuildContext(device=torch.device("cuda"), dtype=torch.float64)
    return ActivationFunction(build, Activation.SILU)


def make_batch(weights: Weights, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    factors = torch.rand(tokens, PER_TOKEN, generator=torch.Generator().manual_seed(1)).cuda()
    return normal(tokens, weights.hidden, seed=7), choose(tokens), factors


@pytest.mark.parametrize("tokens", [1, 7, 40, 400])
@pytest.mark.parametrize(("kind", "tiles"), VARIANTS)
def test_sums_equal_a_plain_loop(kind: str, tiles: str, tokens: int) -> None:
    biased = kind in ("e2m1", "e4m3")
    weights, gate = Weights(kind, biased=biased), ClampedSwiGLU(0.5, 1.702) if biased else silu()
    batch = make_batch(weights, tokens)
    expected = sum_by_loop(weights, gate, *batch) + batch[0].double()
    scale = expected.abs().max().item()
    found = run(weights, gate, TILES[tiles], *batch)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02 * scale)


@pytest.mark.parametrize(("kind", "tiles"), VARIANTS)
def test_a_row_has_the_same_result_in_any_batch(kind: str, tiles: str) -> None:
    weights = Weights(kind)
    batch = make_batch(weights, 90)
    batch[0][3:80] = float("nan")
    whole = run(weights, silu(), TILES[tiles], *batch)
    assert whole[80:].isfinite().all()
    for tokens in (1, 10):
        x, chosen, factors = (tensor[-tokens:] for tensor in batch)
        assert torch.equal(run(weights, silu(), TILES[tiles], x, chosen, factors), whole[-tokens:])


@pytest.mark.parametrize(("kind", "tiles"), VARIANTS)
def test_experts_of_other_ranks_contribute_nothing(kind: str, tiles: str) -> None:
    weights = Weights(kind, biased=True)
    x, chosen, factors = make_batch(weights, 4)
    chosen[1:3] = EXPERTS
    chosen[0, 0] = -1
    found = run(weights, silu(), TILES[tiles], x, chosen, factors)
    assert torch.equal(found[1:3], x[1:3])
    assert not torch.equal(found[3], x[3])
