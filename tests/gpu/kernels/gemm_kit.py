# SPDX-License-Identifier: Apache-2.0
"""Helpers of the GEMM tests: seeded operands, comparisons, and chains of overlapping kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of a weight [n, k] and x [m, k] that returns x times the transpose of the weight, [m, n]."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of normally distributed bfloat16 numbers on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that the relative error (by norm) of a bfloat16 result is below 0.5 %."""
    assert (actual.double() - expected.double()).norm() < 5e-3 * expected.double().norm()


def check_replays(chain: Callable[[], None], out: torch.Tensor, times: int) -> torch.Tensor:
    """Run a chain of kernels that fills `out`, and replay it; every replay must give the same result.

    Returns:
        The result of the first run.
    """
    chain()
    torch.cuda.synchronize()
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(times):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
    return first


def check_chain(gemm: Gemm, size: int, layers: int, count: int) -> None:
    """Run a chain of overlapping GEMMs; the result must be correct, and the same at every replay."""
    weights = [normal(size, size, seed=i) / size**0.5 for i in range(layers)]
    x = normal(count, size, seed=99)
    out = torch.empty_like(x)

    def chain() -> None:
        y = x
        for weight in weights:
            y = gemm(weight, y)
        out.copy_(y)

    actual, exact = check_replays(chain, out, 100), x.double()
    for weight in weights:
        exact = exact @ weight.double().T
    assert (actual.double() - exact).norm() < 0.05 * exact.norm()
