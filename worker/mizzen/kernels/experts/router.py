# SPDX-License-Identifier: Apache-2.0
"""Choice of each token's experts from the router's logits in one launch, and the logits of a few tokens.

The choice is that of `mizzen.layers.experts.router.ExpertRouter`: by score, from the best expert on, and the
first of equal ones, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from mizzen.kernels.launch import pdl_launch_options

MAX_EXPERTS = 1024
"""Maximum number of experts, padded to powers of two, whose scores one warp keeps in registers."""
LOGITS_ROWS = 8
"""Maximum number of tokens for which `router_logits` is meant; a library GEMM multiplies more."""
LOGITS_TILE = 4
"""Experts per block of `router_logits`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    """Rules by which experts are chosen and their outputs weighted; see `ExpertsConfig`."""

    count: int
    per_token: int
    softmax: bool
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    sum_floor: float = 1e-20
    scale: float = 1.0

    @property
    def padded_group(self) -> int:
        """Number of experts in a group, padded to a power of two."""
        return triton.next_power_of_2(self.count // self.groups)

    @property
    def supported(self) -> bool:
        """Return whether the kernel can keep the scores of all experts in registers."""
        return triton.next_power_of_2(self.groups) * self.padded_group <= MAX_EXPERTS


@triton.jit
def _exp(x, LIBRARY: tl.constexpr):
    """Return exp(x); with `LIBRARY` by the function that PyTorch calls on GPUs, to the last bit."""
    if LIBRARY:
        return libdevice.exp(x)
    return tl.exp(x)


@triton.jit
def _rank(values, index):
    """Return int64 keys that sort float32 values as PyTorch does: NaN first, and equal ones by index."""
    values = tl.where(values == 0, 0.0, values)  # -0 equals 0
    bits = values.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _choose_kernel(
    logits, logit_bias, correction, chosen, weights, live, first, floor, scale,
    COUNT: tl.constexpr, HELD: tl.constexpr, PER_TOKEN: tl.constexpr, PADDED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP_PADDED: tl.constexpr,
    SOFTMAX: tl.constexpr, LOGIT_BIAS: tl.constexpr, CORRECTION: tl.constexpr, LIVE: tl.constexpr,
    RENORMALIZE: tl.constexpr, LIBRARY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    LEAST: tl.constexpr = -0x8000000000000000
    GROUP: tl.constexpr = COUNT // GROUPS
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS_PADDED), tl.arange(0, GROUP_PADDED)
    index = group[:, None] * GROUP + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < GROUP)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    scores = tl.load(logits + row * COUNT + index, inside, float("-inf"))
    if LOGIT_BIAS:
        scores += tl.load(logit_bias + index, inside, 0.0).to(tl.float32)
    if SOFTMAX:
        scores = _exp(scores - tl.max(tl.max(scores, 1), 0), LIBRARY)
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = 1 / (1 + _exp(-scores, LIBRARY))
    preferences = scores
    if CORRECTION:
        preferences += tl.load(correction + index, inside, 0.0)
    ranks = tl.where(inside, _rank(preferences, index), LEAST)
    if GROUPS > 1:
        best = tl.max(ranks, 1)
        others = tl.where(ranks == best[:, None], LEAST, ranks)
        second = tl.max(others, 1)
        top_two = (ranks == best[:, None]) | (ranks == second[:, None])
        sums = tl.sum(tl.where(top_two & inside, preferences, 0.0), 1)
        group_ranks = tl.where(group < GROUPS, _rank(sums, group), LEAST)
        allowed = tl.zeros((GROUPS_PADDED,), tl.int1)
        for _ in tl.static_range(TOP_GROUPS):
            is_best = group_ranks == tl.max(group_ranks, 0)
            allowed = allowed | is_best
            group_ranks = tl.where(is_best, LEAST, group_ranks)
        ranks = tl.where(allowed[:, None], ranks, LEAST)
    k = tl.arange(0, PADDED)
    experts, factors = tl.zeros((PADDED,), tl.int64), tl.zeros((PADDED,), tl.float32)
    for i in tl.static_range(PER_TOKEN):
        best = tl.max(tl.max(ranks, 1), 0)
        is_best = ranks == best
        score = tl.sum(tl.sum(tl.where(is_best, scores, 0.0), 1), 0)
        experts = tl.where(k == i, 0x7FFFFFFF - (best & 0x7FFFFFFF), experts)
        factors = tl.where(k == i, score, factors)
        ranks = tl.where(is_best, LEAST, ranks)
    if RENORMALIZE:
        total = tl.sum(factors, 0)
        factors = factors / tl.where(total < floor, floor, total)
    factors *= scale
    experts -= first
    held = (experts >= 0) & (experts < HELD)
    if LIVE:
        held = held & tl.load(live + row)
    at = row * PER_TOKEN + k
    tl.store(chosen + at, tl.where(held, experts, HELD), k < PER_TOKEN)
    tl.store(weights + at, tl.where(held, factors, 0.0), k < PER_TOKEN)


@triton.jit
def _logits_kernel(
    x, weight, logits,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside, within = row < COUNT, column < HIDDEN
    both = inside[:, None] & within[None, :]
    tile = tl.load(weight + row[:, None] * HIDDEN + column[None, :], both, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + token * HIDDEN + column, within, 0.0).to(tl.float32)
    tl.store(logits + token * COUNT + row, tl.sum(tile * values[None, :], 1), inside)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the router's logits, float32 [tokens, experts], for x [tokens, hidden] of a few tokens.

    The weight [experts, hidden] has the type of x or is float32; it is loaded before the kernel waits for the
    previous one. Products are summed in float32, in an order that does not depend on the batch.
    """
    (tokens, hidden), count = x.shape, len(weight)
    logits = torch.empty(tokens, count, dtype=torch.float32, device=x.device)
    columns = triton.next_power_of_2(hidden)
    _logits_kernel[(tokens, triton.cdiv(count, LOGITS_TILE))](
        x, weight, logits,
        COUNT=count, HIDDEN=hidden, ROWS=LOGITS_TILE, COLUMNS=columns,
        num_warps=min(16, max(1, columns * LOGITS_TILE // 2048)), **pdl_launch_options(x),
    )  # fmt: skip
    return logits


def choose_experts(
    logits: torch.Tensor,
    rules: RoutingRules,
    *,
    logit_bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    held: slice | None = None,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token.

    Args:
        logits: Logits, float32 [tokens, experts] (contiguous).
        rules: How experts are chosen.
        logit_bias: Biases to add to the logits, [experts].
        correction: Biases to add to the scores, float32 [experts], for the choice but not for the weights.
        held: Experts that this rank holds; all by default.
        live: Rows that are not padding, bool [tokens]; all by default.

    Returns:
        Experts, int64 [tokens, experts per token], from the best on, counted from the first one that this
        rank holds, and the weights of their outputs, float32 of the same shape. Instead of experts that this
        rank does not hold, and of all experts of padding rows, they have the number of experts held, with the
        weight 0.
    """
    tokens, device = len(logits), logits.device
    held = held or slice(0, rules.count)
    chosen = torch.empty(tokens, rules.per_token, dtype=torch.int64, device=device)
    weights = torch.empty(tokens, rules.per_token, dtype=torch.float32, device=device)
    padded = triton.next_power_of_2(rules.groups), rules.padded_group
    _choose_kernel[(tokens,)](
        logits,
        logits if logit_bias is None else logit_bias,
        logits if correction is None else correction,
        chosen, weights, chosen if live is None else live, held.start, rules.sum_floor, rules.scale,
        COUNT=rules.count, HELD=held.stop - held.start, PER_TOKEN=rules.per_token,
        PADDED=triton.next_power_of_2(rules.per_token), GROUPS=rules.groups, TOP_GROUPS=rules.top_groups,
        GROUPS_PADDED=padded[0], GROUP_PADDED=padded[1], SOFTMAX=rules.softmax,
        LOGIT_BIAS=logit_bias is not None, CORRECTION=correction is not None, LIVE=live is not None,
        RENORMALIZE=rules.renormalize, LIBRARY=logits.is_cuda,
        num_warps=1, **pdl_launch_options(logits),
    )  # fmt: skip
    return chosen, weights
