# SPDX-License-Identifier: Apache-2.0
"""Samples the next token of each row from its logits; the eager reference for the sampling kernels.

The logits of rows with logits params are processed first; `process_logits` defines the order.

A row at temperature 0 takes the most probable token. Any other row divides its logits by the temperature, and
keeps the top k tokens, of these (renormalized) the smallest set that reaches top p, and of these the tokens
with at least min p times the largest probability. It samples by the inverse cumulative distribution, with a
random number derived from (seed, position). The token of a row depends only on the row's own logits and
parameters. The batch determines the algorithm (partial selection or full sort), but both give the same token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mizzen.core.request import Int64
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.sampling.logits_params import BatchLogitsParams, BatchPenalties, LogitEntries
from mizzen.engine.sampling.logprobs import compute_logprobs
from mizzen.engine.sampling.rng import uniform
from mizzen.engine.sampling.side_outputs import LogprobTensors
from mizzen.engine.sampling.token_counts import PROMPT_BIT, TokenCounts
from mizzen.engine.uploader import Uploader

PARTIAL_SORT_LIMIT = 1024
"""Largest top k for which a partial selection is faster than sorting the vocabulary."""


@dataclass(frozen=True, slots=True)
class ActiveFilters:
    """Filters that at least one row of a batch uses."""

    max_top_k: int
    """Largest top k of the batch if every row has one, else 0."""
    top_k: bool
    top_p: bool
    min_p: bool

    @property
    def needs_order(self) -> bool:
        """Whether candidates must be sorted by probability."""
        return self.top_k or self.top_p


def active_filters(state: SlotState, slots: Int64) -> ActiveFilters:
    """Return the filters that the requests in `slots` use, from the host's copy of the state."""
    top_k = state.top_k.host[slots]
    return ActiveFilters(
        max_top_k=int(top_k.max()) if top_k.all() else 0,
        top_k=bool(top_k.any()),
        top_p=bool((state.top_p.host[slots] < 1).any()),
        min_p=bool((state.min_p.host[slots] > 0).any()),
    )


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Sampled tokens of a step and their log probabilities."""

    tokens: torch.Tensor
    """Sampled tokens, int64 [rows]."""
    logprobs: LogprobTensors | None
    """Log probabilities of the rows that report them; None if no row does."""


def sample(
    logits: torch.Tensor,
    state: SlotState,
    slots: Int64,
    positions: Int64,
    upload: Uploader,
    *,
    fused: bool = False,
) -> SampleResult:
    """Sample one token per row, and compute log probabilities of the rows that report them.

    Args:
        logits: Logits of the model, [rows, vocab].
        state: Per-slot state.
        slots: Slot of each row, int64 [rows].
        positions: Sequence position of the token to sample for each row, int64 [rows].
        upload: Copies arrays to the device.
        fused: Use the kernels of `mizzen.kernels`.
    """
    batch = state.logits_params.gather_batch(slots, positions)
    if batch is None:
        return SampleResult(sample_tokens(logits, state, slots, positions, upload, fused=fused), None)
    if len(batch.rows) == len(slots):
        tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
    else:
        tokens = sample_tokens(logits, state, slots, positions, upload, fused=fused)
    processed = sample_processed_rows(batch, logits, tokens, state, positions, upload, fused=fused)
    if batch.logprobs is None:
        return SampleResult(tokens, None)
    return SampleResult(tokens, compute_logprobs(batch.logprobs, logits, processed, tokens, fused=fused))


def sample_processed_rows(
    batch: BatchLogitsParams,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    state: SlotState,
    positions: Int64,
    upload: Uploader,
    *,
    fused: bool = False,
) -> torch.Tensor | None:
    """Process logits of `batch.rows`, sample these rows, and count the tokens for penalties.

    Args:
        batch: Logits params of the batch.
        logits: Logits of the model, [rows, vocab].
        tokens: Tokens of all batch rows, int64 [rows]; updated in place for `batch.rows`.
        state: Per-slot state.
        positions: Sequence position of the token to sample for each batch row, int64 [rows].
        upload: Copies arrays to the device.
        fused: Use the kernels of `mizzen.kernels`.

    Returns:
        Processed logits, float32 [len(batch.rows), vocab], or None if `batch.rows` is empty.
    """
    if not len(batch.rows):
        return None
    positions = positions[batch.rows]
    processed = process_logits(batch, logits, state, positions, fused=fused)
    sampled = sample_tokens(processed, state, batch.slots, positions, upload, fused=fused)
    tokens[batch.rows_device] = sampled
    if batch.penalties is not None:
        state.logits_params.counts.count_tokens(batch.penalties.count_rows, sampled[batch.penalties.rows])
    return processed


def process_logits(
    batch: BatchLogitsParams, logits: torch.Tensor, state: SlotState, positions: Int64, *, fused: bool = False
) -> torch.Tensor:
    """Return the logits from which the rows of `batch.rows` sample, float32 [len(batch.rows), vocab].

    `positions` holds the sequence positions of the tokens to sample, int64 [len(batch.rows)]. This function
    defines the order of processing:

        bias         is added; -100 bans the token
        penalties    repetition, then frequency, then presence
        end ban      bans end tokens while the output is shorter than min_tokens
        grammar      excludes tokens that it does not allow; if it allows only banned tokens, one of those is
                     sampled

    Log probabilities are computed from the result. Temperature, top k, top p and min p follow in
    `sample_tokens`.
    """
    processed = logits[batch.rows_device].float()
    if batch.bias is not None:
        bias = batch.bias
        processed[bias.rows, bias.ids] += bias.values
    if batch.banning_bias is not None:
        set_logits(processed, batch.banning_bias)
    if batch.penalties is not None:
        apply_penalties(processed, batch.penalties, state.logits_params.counts, fused=fused)
    if batch.end_bans is not None:
        set_logits(processed, batch.end_bans)
    masks = state.logits_params.masks
    if masks is not None and len(batch.masked_rows):
        bits = masks.update_bitmasks(batch.slots[batch.masked_rows], positions[batch.masked_rows])
        apply_bitmask(processed, batch.masked_rows_device, batch.masked_slots_device, bits, fused=fused)
        masks.mark_applied()
    return processed


def set_logits(logits: torch.Tensor, entries: LogitEntries) -> None:
    """Set individual logits, in place."""
    logits[entries.rows, entries.ids] = entries.values


def apply_penalties(
    logits: torch.Tensor, penalties: BatchPenalties, counts: TokenCounts, *, fused: bool = False
) -> None:
    """Apply penalties to rows of logits, float32 [rows, vocab], in place."""
    if fused:
        from mizzen.kernels.sampling.penalties import penalize as penalize_fused

        penalize_fused(logits, penalties, counts.table)
        return
    seen = counts.table[penalties.count_rows]
    output = seen & (PROMPT_BIT - 1)
    rows, repetition = logits[penalties.rows], penalties.repetition[:, None]
    repeated = torch.where(rows > 0, rows / repetition, rows * repetition)
    rows = torch.where(seen > 0, repeated, rows)
    rows -= penalties.frequency[:, None] * output
    rows -= penalties.presence[:, None] * (output > 0)
    logits[penalties.rows] = rows


def apply_bitmask(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, bits: torch.Tensor, *, fused: bool = False
) -> None:
    """Set logits to -inf, in place, for tokens that a grammar does not allow.

    Args:
        logits: Logits, float32 [all rows, vocab].
        rows: Rows that have a grammar, int64 [n].
        slots: Slot of each of these rows, int64 [n].
        bits: Allowed tokens by slot, int32 [slots, ceil(vocab / 32)]; see `TokenMasks.update_bitmasks`.
        fused: Use the kernel of `mizzen.kernels`.
    """
    if fused:
        from mizzen.kernels.sampling.bitmask import mask_tokens as mask_tokens_fused

        mask_tokens_fused(logits, rows, slots, bits)
        return
    bit_indices = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[slots][:, :, None] >> bit_indices) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def sample_tokens(
    logits: torch.Tensor,
    state: SlotState,
    slots: Int64,
    positions: Int64,
    upload: Uploader,
    *,
    fused: bool = False,
) -> torch.Tensor:
    """Sample one token per row from processed logits [rows, vocab]; return int64 [rows].

    `slots` holds the slots of the rows, and `positions` the sequence positions of the tokens to sample, both
    int64 [rows]. With `fused`, the kernels of `mizzen.kernels` are used.
    """
    if fused:
        return sample_fused(logits, state, slots, positions, upload)
    random = np.flatnonzero(state.temperature.host[slots] > 0)
    if not len(random):
        return logits.argmax(dim=-1)
    if len(random) == len(slots):
        return sample_random(logits, state, slots, positions, upload)
    tokens = logits.argmax(dim=-1)
    rows = upload(random)
    tokens[rows] = sample_random(logits[rows], state, slots[random], positions[random], upload)
    return tokens


def sample_fused(
    logits: torch.Tensor, state: SlotState, slots: Int64, positions: Int64, upload: Uploader
) -> torch.Tensor:
    """Sample one token per row with kernels; return int64 [rows].

    Each row is first sampled as if it had no filters; then rows with filters are sampled again. `logits` are
    [rows, vocab]; `slots` and `positions` (of the tokens to sample) are int64 [rows].
    """
    from mizzen.kernels.sampling import top_k_top_p
    from mizzen.kernels.sampling.sample import sample_tokens as draw_unfiltered

    slots_device, positions_device = upload.upload_together(
        slots.astype(np.int32), positions.astype(np.int32)
    )
    tokens = draw_unfiltered(
        logits, slots_device, positions_device, state.temperature.device, state.seed.device
    )
    rows = rows_with_filters(state, slots)
    if not len(rows):
        return tokens
    index = upload(rows)
    if top_k_top_p.supports(logits.shape[1], logits.dtype, logits.device):
        top_k_top_p.sample_top_k_top_p(
            logits, index, slots_device, positions_device, state.sampling_tensors, tokens
        )
    else:
        tokens[index] = sample_random(logits[index], state, slots[rows], positions[rows], upload)
    return tokens


def rows_with_filters(state: SlotState, slots: Int64) -> Int64:
    """Return the indices of rows with top k, top p or min p at a temperature above 0, int64 [n]."""
    filters = (state.top_k.host[slots] > 0) | (state.top_p.host[slots] < 1) | (state.min_p.host[slots] > 0)
    return np.flatnonzero(filters & (state.temperature.host[slots] > 0))


def sample_random(
    logits: torch.Tensor, state: SlotState, slots: Int64, positions: Int64, upload: Uploader
) -> torch.Tensor:
    """Sample one token per row by eager operations; return int64 [rows].

    The temperature of each row is above 0.
    `logits` are [rows, vocab]; `slots` and `positions` (of the tokens to sample) are int64 [rows].
    """
    index, filters = upload(slots), active_filters(state, slots)
    logits = logits.float() / state.temperature.device[index, None]
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    if filters.needs_order:
        floor = min_kept_weight(weights, filters, state, index)
        weights = weights.masked_fill(weights < floor, 0)
    if filters.min_p:
        weights = weights.masked_fill(weights < state.min_p.device[index, None], 0)  # the largest is 1
    return sample_by_inverse_cdf(weights, uniform(state.seed.device[index], upload(positions)))


def min_kept_weight(
    weights: torch.Tensor, filters: ActiveFilters, state: SlotState, index: torch.Tensor
) -> torch.Tensor:
    """Return the smallest weight that top k and top p keep in each row, [rows, 1]; 0 for rows with neither.

    All tokens with at least this weight are kept, so the order of tokens with equal weight has no effect.

    Args:
        weights: Unnormalized probabilities, float32 [rows, vocab].
        filters: Filters of the rows.
        state: Per-slot state.
        index: Slot of each row, int64 [rows] on the device.
    """
    ranked = sort_weights(weights, filters)
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
        # `kept` is empty in a row without any possible token.
        last = ranked.gather(-1, (kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0))
        floor = torch.where(top_p < 1, torch.maximum(floor, last), floor)
    return floor


def sort_weights(weights: torch.Tensor, filters: ActiveFilters) -> torch.Tensor:
    """Sort weights [rows, vocab] in descending order; return only the first `max_top_k` if these suffice."""
    if 0 < filters.max_top_k <= min(PARTIAL_SORT_LIMIT, weights.shape[-1]):
        return torch.topk(weights, filters.max_top_k, dim=-1).values
    return torch.sort(weights, dim=-1, descending=True).values


def sample_by_inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample an index per row, int64 [rows]: the first whose cumulative weight exceeds `uniforms` * total.

    Weights are summed in vocabulary order and in float64. So the result depends neither on the filters of
    other rows nor on the order of summation, which differs between devices and batches.

    Args:
        weights: Unnormalized probabilities, float32 [rows, vocab].
        uniforms: Random numbers in [0, 1), float64 [rows].
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return index.clamp_(max=weights.shape[-1] - 1)  # if no token is possible, no index was found
