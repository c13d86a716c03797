"""Draws the next token of each row from its logits.

Rows whose request asks for it first have their logits processed: see `process` for what is done in which
order.

Rows at temperature 0 take the most probable token. The others divide logits by the temperature, keep the
top k, of those (renormalised) the smallest set that reaches top p, drop what is below min p times the most
probable, and draw by the inverse of the cumulative distribution, with one random number of (seed, position).
A row's token depends on its own logits and parameters alone: what is computed in other ways for other
batches (a partial selection or a sort) yields the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mizzen.core.request import Int64
from mizzen.engine.execution.slot_state import SlotState, Uploader
from mizzen.engine.sampling.logits_params import PROMPT, TokenCounts
from mizzen.engine.sampling.logprobs import report
from mizzen.engine.sampling.rng import uniform
from mizzen.engine.sampling.side_outputs import LogprobTensors
from mizzen.engine.sampling.slot_params import BatchExtras, Entries, Penalties

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
        """Whether candidates must be ordered by their probability."""
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


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step draws."""

    tokens: torch.Tensor
    """int64 [rows]."""
    logprobs: LogprobTensors | None
    """Of the rows that report them."""


def sample(
    logits: torch.Tensor,
    state: SlotState,
    slots: Int64,
    positions: Int64,
    upload: Uploader,
    *,
    fused: bool = False,
) -> Sampled:
    """Draw one token a row from logits [rows, vocab].

    `slots` are the rows' slots, `positions` the sequence positions of the tokens to be drawn. `fused` uses
    the kernels of `mizzen.kernels`.
    """
    batch = state.extras.batch(slots, positions)
    if batch is None:
        return Sampled(choose(logits, state, slots, positions, upload, fused=fused), None)
    if len(batch.rows) == len(slots):
        tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
    else:
        tokens = choose(logits, state, slots, positions, upload, fused=fused)
    processed = draw_processed(batch, logits, tokens, state, positions, upload, fused=fused)
    if batch.logprobs is None:
        return Sampled(tokens, None)
    return Sampled(tokens, report(batch.logprobs, logits, processed, tokens, fused=fused))


def draw_processed(
    batch: BatchExtras,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    state: SlotState,
    positions: Int64,
    upload: Uploader,
    *,
    fused: bool = False,
) -> torch.Tensor | None:
    """Draw the rows of processed logits, into `tokens` (int64 [rows]), and count them; return the logits."""
    if not len(batch.rows):
        return None
    positions = positions[batch.rows]
    processed = process(batch, logits, state, positions, fused=fused)
    drawn = choose(processed, state, batch.slots, positions, upload, fused=fused)
    tokens[batch.index] = drawn
    if batch.penalties is not None:
        state.extras.counts.add(batch.penalties.counts, drawn[batch.penalties.rows])
    return processed


def process(
    batch: BatchExtras, logits: torch.Tensor, state: SlotState, positions: Int64, *, fused: bool = False
) -> torch.Tensor:
    """Return the logits that the rows of `batch.rows` draw from, float32 [len(batch.rows), vocab].

    This is the order, and the one place that knows it:

        bias         is added; -100 bans the token
        penalties    repetition, then frequency, then presence
        end ban      of the tokens that end the request, while its output is shorter than min_tokens
        grammar      a token that it does not allow is impossible; where it allows banned ones alone, they
                     may be drawn
                     (log probabilities are those of the result)
        temperature, top k, top p, min p and the draw follow in `choose`
    """
    processed = logits[batch.index].float()
    if batch.bias is not None:
        bias = batch.bias
        processed[bias.rows, bias.ids] += bias.numbers
    if batch.set_bias is not None:
        put(processed, batch.set_bias)
    if batch.penalties is not None:
        penalize(processed, batch.penalties, state.extras.counts, fused=fused)
    if batch.bans is not None:
        put(processed, batch.bans)
    masks = state.extras.masks
    if masks is not None and len(batch.masked):
        bits = masks.bits(batch.slots[batch.masked], positions[batch.masked])
        mask_tokens(processed, batch.masked_index, batch.masked_slots, bits, fused=fused)
        masks.applied()
    return processed


def put(logits: torch.Tensor, entries: Entries) -> None:
    """Set single logits."""
    logits[entries.rows, entries.ids] = entries.numbers


def penalize(logits: torch.Tensor, penalties: Penalties, counts: TokenCounts, *, fused: bool = False) -> None:
    """Penalise rows of float32 logits [rows, vocab] in place."""
    if fused:
        from mizzen.kernels.sampling.penalties import penalize as penalize_fused

        penalize_fused(logits, penalties, counts.table)
        return
    seen = counts.table[penalties.counts]
    output = seen & (PROMPT - 1)
    rows, repetition = logits[penalties.rows], penalties.repetition[:, None]
    repeated = torch.where(rows > 0, rows / repetition, rows * repetition)
    rows = torch.where(seen > 0, repeated, rows)
    rows -= penalties.frequency[:, None] * output
    rows -= penalties.presence[:, None] * (output > 0)
    logits[penalties.rows] = rows


def mask_tokens(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, bits: torch.Tensor, *, fused: bool = False
) -> None:
    """Make what a grammar does not allow impossible, in place.

    Args:
        logits: float32 [all rows, vocab].
        rows: the rows that have a grammar, int64 [n].
        slots: their slots, int64 [n].
        bits: what slots allow, int32 [any, ceil(vocab / 32)]; see `TokenMasks`.
        fused: in one kernel.
    """
    if fused:
        from mizzen.kernels.sampling.bitmask import mask_tokens as mask_tokens_fused

        mask_tokens_fused(logits, rows, slots, bits)
        return
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[slots][:, :, None] >> places) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def choose(
    logits: torch.Tensor,
    state: SlotState,
    slots: Int64,
    positions: Int64,
    upload: Uploader,
    *,
    fused: bool = False,
) -> torch.Tensor:
    """Draw one token a row from logits that are final: [rows, vocab] → int64 [rows]."""
    if fused:
        return sample_fused(logits, state, slots, positions, upload)
    random = np.flatnonzero(state.temperature.host[slots] > 0)
    if not len(random):
        return logits.argmax(dim=-1)
    if len(random) == len(slots):
        return draw(logits, state, slots, positions, upload)
    tokens = logits.argmax(dim=-1)
    rows = upload(random)
    tokens[rows] = draw(logits[rows], state, slots[random], positions[random], upload)
    return tokens


def sample_fused(
    logits: torch.Tensor, state: SlotState, slots: Int64, positions: Int64, upload: Uploader
) -> torch.Tensor:
    """Draw on a GPU: every row as if it had no filters, then those that have some."""
    from mizzen.kernels.sampling import top_k_top_p
    from mizzen.kernels.sampling.draw import draw as draw_unfiltered

    on_device, places = upload.each(slots.astype(np.int32), positions.astype(np.int32))
    tokens = draw_unfiltered(logits, on_device, places, state.temperature.device, state.seed.device)
    rows = filtered_rows(state, slots)
    if not len(rows):
        return tokens
    index = upload(rows)
    if top_k_top_p.serves(logits.shape[1], logits.dtype, logits.device):
        top_k_top_p.draw_filtered(logits, index, on_device, places, state.drawing, tokens)
    else:
        tokens[index] = draw(logits[index], state, slots[rows], positions[rows], upload)
    return tokens


def filtered_rows(state: SlotState, slots: Int64) -> Int64:
    """Return which rows draw from a part of the vocabulary."""
    filters = (state.top_k.host[slots] > 0) | (state.top_p.host[slots] < 1) | (state.min_p.host[slots] > 0)
    return np.flatnonzero(filters & (state.temperature.host[slots] > 0))


def draw(
    logits: torch.Tensor, state: SlotState, slots: Int64, positions: Int64, upload: Uploader
) -> torch.Tensor:
    """Draw rows whose temperature is above 0."""
    index, filters = upload(slots), filters_of(state, slots)
    logits = logits.float() / state.temperature.device[index, None]
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    if filters.ordered:
        floor = ordered_floor(weights, filters, state, index)
        weights = weights.masked_fill(weights < floor, 0)
    if filters.min_p:
        weights = weights.masked_fill(weights < state.min_p.device[index, None], 0)  # the largest is 1
    return invert(weights, uniform(state.seed.device[index], upload(positions)))


def ordered_floor(
    weights: torch.Tensor, filters: Filters, state: SlotState, index: torch.Tensor
) -> torch.Tensor:
    """Return the weight [rows, 1] of the last token that top k and top p keep; 0 where neither is asked for.

    Tokens are kept by weight, so that which of two equal ones an ordering puts first decides nothing.
    """
    ranked = rank(weights, filters)
    floor = torch.zeros_like(ranked[:, :1])
    if filters.top_k:
        top_k = state.top_k.device[index, None]
        limited = top_k > 0
        last = ranked.gather(-1, (top_k - 1).clamp(0, ranked.shape[-1] - 1))
        floor = torch.where(limited, last, floor)
        ranks = torch.arange(ranked.shape[-1], device=ranked.device)
        ranked = ranked.masked_fill(limited & (ranks >= top_k), 0)
    if filters.top_p:
        top_p = state.top_p.device[index, None]
        cumulative = ranked.cumsum(dim=-1, dtype=torch.float64)
        kept = cumulative - ranked < top_p * cumulative[:, -1:]
        # Of a row in which nothing is possible nothing is kept.
        last = ranked.gather(-1, (kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0))
        floor = torch.where(top_p < 1, torch.maximum(floor, last), floor)
    return floor


def rank(weights: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return weights in falling order: as many as the widest top k, or all."""
    if 0 < filters.widest <= min(TOPK_LIMIT, weights.shape[-1]):
        return torch.topk(weights, filters.widest, dim=-1).values
    return torch.sort(weights, dim=-1, descending=True).values


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative weight exceeds `uniforms` (float64 [rows]) of the total.

    In the vocabulary's order and in float64, so that neither filters of other rows nor the order of the sum,
    which differs between devices and batches, decide anything.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return drawn.clamp_(max=weights.shape[-1] - 1)  # a row in which nothing is possible has no such index
