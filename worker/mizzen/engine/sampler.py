"""Draws the next token of each row from its logits.

Rows at temperature 0 take the most probable token. The others divide logits by the temperature, keep the
top k, of those (renormalised) the smallest set that reaches top p, drop what is below min p times the most
probable, and draw by the inverse of the cumulative distribution, with one random number of (seed, position).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mizzen.core.request import Int64
from mizzen.engine.random import uniform
from mizzen.engine.state import SlotState, Uploader

TOPK_LIMIT = 1024
"""Up to this k a partial selection is faster than sorting the vocabulary."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Which filters any row of a batch asks for."""

    widest: int
    """Largest top k, when every row has one; else 0."""
    top_k: bool
    top_p: bool
    min_p: bool

    @property
    def ordered(self) -> bool:
        """Whether candidates must be in the order of their probability."""
        return self.top_k or self.top_p


def filters_of(state: SlotState, slots: Int64) -> Filters:
    """Read from the host's side which filters the slots' requests ask for."""
    top_k = state.top_k.host[slots]
    return Filters(
        widest=int(top_k.max()) if top_k.all() else 0,
        top_k=bool(top_k.any()),
        top_p=bool((state.top_p.host[slots] < 1).any()),
        min_p=bool((state.min_p.host[slots] > 0).any()),
    )


def sample(
    logits: torch.Tensor, state: SlotState, slots: Int64, positions: Int64, upload: Uploader
) -> torch.Tensor:
    """Draw one token a row: logits [rows, vocab] → int64 [rows].

    `slots` are the rows' slots, `positions` the sequence positions of the tokens to be drawn.
    """
    random = np.flatnonzero(state.temperature.host[slots] > 0)
    if not len(random):
        return logits.argmax(dim=-1)
    if len(random) == len(slots):
        return draw(logits, state, slots, positions, upload)
    tokens = logits.argmax(dim=-1)
    rows = upload(random)
    tokens[rows] = draw(logits[rows], state, slots[random], positions[random], upload)
    return tokens


def draw(
    logits: torch.Tensor, state: SlotState, slots: Int64, positions: Int64, upload: Uploader
) -> torch.Tensor:
    """Draw rows whose temperature is above 0."""
    index, filters = upload(slots), filters_of(state, slots)
    logits = logits.float() / state.temperature.device[index, None]
    ids = None
    if filters.ordered:
        logits, ids = order(logits, filters)
    weights = torch.softmax(logits, dim=-1)
    if filters.top_k:
        weights = keep_top_k(weights, state.top_k.device[index, None])
    if filters.top_p:
        weights = keep_top_p(weights, state.top_p.device[index, None])
    if filters.min_p:
        floor = weights.amax(dim=-1, keepdim=True) * state.min_p.device[index, None]
        weights = weights.masked_fill(weights < floor, 0)
    chosen = invert(weights, uniform(state.seed.device[index], upload(positions)))
    return chosen if ids is None else ids.gather(-1, chosen[:, None])[:, 0]


def order(logits: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Return candidates in falling order and their ids: the widest top k, or all."""
    if 0 < filters.widest <= min(TOPK_LIMIT, logits.shape[-1]):
        return torch.topk(logits, filters.widest, dim=-1)
    return torch.sort(logits, dim=-1, descending=True, stable=True)


def keep_top_k(weights: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Drop what stands behind the first k (int64 [rows, 1], 0 keeps all) of ordered weights."""
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    return weights.masked_fill((ranks >= top_k) & (top_k > 0), 0)


def keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Drop what stands behind the smallest leading set whose share reaches top p ([rows, 1])."""
    before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
    return weights.masked_fill(before >= top_p * weights.sum(dim=-1, keepdim=True, dtype=torch.float64), 0)


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative weight exceeds `uniforms` (float64 [rows]) of the total.

    In float64, so that the sum's order, which differs between devices and batches, does not decide.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
