"""Helpers of the GEMM tests: seeded operands, comparisons, and chains of overlapping kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(weight, x): x times the transpose of weight."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw bfloat16 numbers on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare a bfloat16 result with an exact one."""
    assert (got.double() - wanted.double()).norm() < 5e-3 * wanted.double().norm()


def check_replays(chain: Callable[[], None], out: torch.Tensor, times: int) -> torch.Tensor:
    """Run a chain of kernels, which fills `out`, then replay it; return what it gives, the same each time."""
    chain()
    torch.cuda.synchronize()
    found = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(times):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, found)
    return found


def check_chain(gemm: Gemm, size: int, layers: int, count: int) -> None:
    """Run a chain of GEMMs, each of which starts while the previous one runs; every replay must give the
    same."""
    weights = [normal(size, size, seed=i) / size**0.5 for i in range(layers)]
    x = normal(count, size, seed=99)
    out = torch.empty_like(x)

    def chain() -> None:
        y = x
        for weight in weights:
            y = gemm(weight, y)
        out.copy_(y)

    found, exact = check_replays(chain, out, 100), x.double()
    for weight in weights:
        exact = exact @ weight.double().T
    assert (found.double() - exact).norm() < 0.05 * exact.norm()
