"""Products of batches equal PyTorch's, whatever the cut, alone and in a chain of kernels that overlap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_kit import check_chain, close, normal

from mizzen.kernels.gemm.swap_ab import Cut, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
CUTS = (
    Cut(64, 1, 1),
    Cut(64, 1, 4),
    Cut(64, 2, 1, blocks=2),
    Cut(64, 4, 2),
    Cut(128, 1, 2),
    Cut(128, 2, 4),
    Cut(128, 4, 1),
    Cut(128, 3, 2),
    Cut(192, 1, 2),
    Cut(192, 4, 1),
)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_wide(cut: Cut) -> None:
    for rows, columns in ((16, 256), (1040, 1024), (3072, 4352), (64, 25600)):
        weight = normal(rows, columns) / columns**0.5
        for batch in (16, 48, 128, 176, 256):
            if cut.serves(rows, columns, batch):
                compare(weight, batch, cut)


@pytest.mark.parametrize("split", [2, 3, 5, 6, 7])
def test_parts_of_unequal_length(split: int) -> None:
    for columns in (64 * (2 * split + 1), 64 * (7 * split - 1)):
        cut = Cut(64, split, 1)
        assert cut.serves(208, columns, 80)
        compare(normal(208, columns) / columns**0.5, 80, cut)


def test_a_late_product_is_the_same() -> None:
    weight, x = normal(1040, 1024) / 32, normal(40, 1024, seed=1)
    assert torch.equal(wide(weight, x, late=True), wide(weight, x))
    check_chain(lambda weight, y: wide(weight, y, late=True), 2048, 30, 40)


def compare(weight: torch.Tensor, batch: int, cut: Cut) -> None:
    rows, columns = weight.shape
    for count in (batch, batch - 5):
        x = normal(count, columns, seed=count)
        out = torch.full((count, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
        wanted = x.double() @ weight.double().T
        close(wide(weight, x, cut=cut), wanted)
        close(wide(weight, x, out, cut=cut), wanted)
        if cut.share == 1 or batch == 256:  # each is compiled
            gate, other = wanted.chunk(2, -1)
            close(wide(weight, x, gate=True, cut=cut), F.silu(gate) * other)


@pytest.mark.parametrize(("count", "cut"), [(20, None), (64, Cut(64, 4, 1)), (100, Cut(128, 2, 2))], ids=str)
def test_a_chain_of_overlapping_products_is_right_every_time(count: int, cut: Cut | None) -> None:
    check_chain(lambda weight, y: wide(weight, y, cut=cut), 2048, 30, count)


def test_what_no_cut_serves_is_refused() -> None:
    with pytest.raises(ValueError, match="no cut"):
        wide(normal(64, 96), normal(4, 96))
    with pytest.raises(ValueError, match="no cut"):
        wide(normal(64, 128), normal(257, 128))
