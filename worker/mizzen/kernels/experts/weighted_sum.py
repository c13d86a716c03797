# SPDX-License-Identifier: Apache-2.0
"""Weighted sum of the outputs of each token's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.launch import pdl_launch_options

BLOCK = 512


@triton.jit
def _sum_kernel(
    outputs, chosen, weights, added, total,
    HELD: tl.constexpr, PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + k
        expert = tl.load(chosen + pair)
        held = (expert >= 0) & (expert < HELD)
        factor = tl.load(weights + pair, held, 0.0)
        output = tl.load(outputs + pair * HIDDEN + columns, inside & held, 0.0)
        sums += factor * output.to(tl.float32)
    if ADD:
        sums += tl.load(added + token * HIDDEN + columns, inside, 0.0).to(tl.float32)
    tl.store(total + token * HIDDEN + columns, sums.to(total.dtype.element_ty), inside)


def sum_pairs(
    outputs: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    held: int,
    added: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's outputs, [tokens, hidden].

    The outputs are added in the order of the token's experts, in float32, and the sum is rounded once: it is
    the same in any batch. Outputs of experts outside [0, held) are not read.

    Args:
        outputs: Outputs of all pairs, [tokens * per_token, hidden].
        chosen: Experts of each token, int64 [tokens, per_token].
        weights: Factors of the outputs, float32 of the same shape.
        held: Number of experts that this rank holds.
        added: Tensor [tokens, hidden] to add to the sum, such as the output of a shared expert.
        dtype: Data type of the sum; that of the outputs by default.
    """
    (tokens, per_token), hidden = chosen.shape, outputs.shape[1]
    total = torch.empty(tokens, hidden, dtype=dtype or outputs.dtype, device=outputs.device)
    _sum_kernel[(tokens, triton.cdiv(hidden, BLOCK))](
        outputs, chosen, weights, outputs if added is None else added, total,
        HELD=held, PER_TOKEN=per_token, HIDDEN=hidden, ADD=added is not None,
        BLOCK=BLOCK, num_warps=2, **pdl_launch_options(outputs),
    )  # fmt: skip
    return total
