# SPDX-License-Identifier: Apache-2.0
"""Logits params: bias, penalties, bans of end tokens, grammars and log probabilities, by slot and by batch.

The params of slots are kept on the host. `gather_batch` uploads those of a batch; the result is reused while
the batch stays the same. Most requests have no logits params, so for most batches only a host array of flags
is checked. `SlotState` owns the `LogitsParamsTable`; sampler and decode graphs use the params of batches.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.core.request import Int32, Int64
from mizzen.core.sampling_params import Grammar
from mizzen.core.step_plan import Float32, SlotOptions, SlotStart
from mizzen.engine.sampling.logprobs import LogprobRows
from mizzen.engine.sampling.token_counts import TokenCounts
from mizzen.engine.uploader import Uploader

MIN_BIAS = -100.0
"""Bias value that bans a token."""
BANNED_LOGIT = -1e30
"""Logit of a banned token, which is sampled only if no other token is possible.

It is finite, so that it can be divided by a temperature."""
UNLIMITED_STEPS = 1 << 62
"""Value of `BatchLogitsParams.valid_steps` if no ban of end tokens will expire."""


class LogitsFeature(enum.IntFlag):
    """Kinds of logits params that a request has, as bits."""

    BIAS = 1
    PENALTIES = 2
    END_BAN = 4
    GRAMMAR = 8
    LOGPROBS = 16


LASTING_FEATURES = int(LogitsFeature.BIAS | LogitsFeature.PENALTIES | LogitsFeature.GRAMMAR)
"""Features for which logits are processed in every step until the request finishes."""


class TokenMasks(Protocol):
    """Bitmasks of the tokens that grammars allow, by slot; `mizzen.engine.grammar.matchers` implements it."""

    @property
    def active(self) -> bool:
        """Whether any slot has a request with a grammar."""
        ...

    def start_slot(self, slot: int, grammar: Grammar, output: Int32) -> None:
        """Start a request in a slot, with the output tokens that it already has, int32 [n]."""
        ...

    def free_slot(self, slot: int) -> None:
        """Drop the grammar of a slot."""
        ...

    def add_launched_step(self, slots: Int64, tokens: Callable[[], NDArray[Any]]) -> None:
        """Record a launched step that samples one token for each of `slots` [rows].

        `tokens` waits for the step and returns these tokens, [rows].
        """
        ...

    def update_bitmasks(self, slots: Int64, positions: Int64) -> torch.Tensor:
        """Return the bitmasks on the device, int32 [n, ceil(vocab / 32)], with a row per slot.

        Only the rows of `slots` [rows] are valid. Bit t % 32 of word t // 32 is set if token t may be sampled
        at the slot's position in `positions` [rows]. Called once per step, after the model's work is
        enqueued; it may wait for the tokens of previous steps.
        """
        ...

    def mark_applied(self) -> None:
        """Record that all work that reads the bitmasks of a step is enqueued."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLogitsParams:
    """Logits params of the request in a slot."""

    features: int
    """Bits of `LogitsFeature`."""
    bias_ids: Int64
    """Ids of tokens with a bias, int64 [n]."""
    bias: Float32
    """Bias of each token in `bias_ids`, float32 [n]."""
    banned_ids: Int64
    """Ids of tokens that the bias bans, int64 [n]."""
    end_ids: Int64
    """Ids of end tokens that are banned until `min_tokens` is reached, int64 [n]."""
    ban_until: int
    """First sequence position at which the end tokens are not banned."""
    penalties: tuple[float, float, float]
    """Frequency, presence and repetition penalty."""
    top_logprobs: int
    """Number of most probable tokens to report with each sampled token."""
    logprob_token_ids: Int64
    """Ids of further tokens whose log probabilities are reported, int64 [n]."""

    @classmethod
    def from_start(cls, start: SlotStart, options: SlotOptions) -> SlotLogitsParams:
        """Return the logits params of a request that starts in a slot."""
        sampling = start.sampling
        penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
        ban_until = options.prompt_tokens + sampling.min_tokens
        bans = ban_until > len(options.tokens) and len(options.end_tokens) > 0
        bias = dict(sampling.logit_bias)
        ids, values = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        is_bias = values > MIN_BIAS
        features = LogitsFeature.BIAS * bool(bias)
        features |= LogitsFeature.PENALTIES * (penalties != (0.0, 0.0, 1.0))
        features |= LogitsFeature.END_BAN * bans
        features |= LogitsFeature.GRAMMAR * (sampling.grammar is not None)
        features |= LogitsFeature.LOGPROBS * (sampling.logprobs is not None)
        return cls(
            features=int(features),
            bias_ids=ids[is_bias],
            bias=values[is_bias],
            banned_ids=ids[~is_bias],
            end_ids=np.array(options.end_tokens if bans else (), np.int64),
            ban_until=ban_until if bans else 0,
            penalties=penalties,
            top_logprobs=sampling.logprobs or 0,
            logprob_token_ids=np.array(sampling.logprob_token_ids, np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEntries:
    """Individual logits to change; each tensor is [n] on the device."""

    rows: torch.Tensor
    """Index of each logit's row within `BatchLogitsParams.rows`."""
    ids: torch.Tensor
    """Token ids."""
    values: torch.Tensor
    """Values to add or to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPenalties:
    """Penalties of the processed rows that have any; each tensor is [n] on the device."""

    rows: torch.Tensor
    """Index of each penalized row within `BatchLogitsParams.rows`."""
    count_rows: torch.Tensor
    """For each penalized row, the row of `TokenCounts` that belongs to its slot."""
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLogitsParams:
    """Logits params of a batch; valid while the batch has the same slots in the same order."""

    rows: Int64
    """Batch rows whose logits are processed, ascending, int64 [n]."""
    rows_device: torch.Tensor
    """`rows` on the device."""
    slots: Int64
    """Slot of each row in `rows`."""
    slots_device: torch.Tensor
    """`slots` on the device."""
    bias: LogitEntries | None
    """Biases to add to logits; None if no row has a bias."""
    banning_bias: LogitEntries | None
    """Logits to set for tokens that a bias bans; None if no bias bans a token."""
    penalties: BatchPenalties | None
    """Penalties; None if no row has any."""
    end_bans: LogitEntries | None
    """Logits to set for end tokens, in rows below `min_tokens`; None if there is no such row."""
    masked_rows: Int64
    """Indices within `rows` of the rows with a grammar."""
    masked_rows_device: torch.Tensor
    """`masked_rows` on the device."""
    masked_slots_device: torch.Tensor
    """Slot of each row in `masked_rows`, on the device."""
    logprobs: LogprobRows | None
    """Batch rows that report log probabilities; None if no row does."""
    valid_steps: int
    """Number of steps for which these params are valid; after them, a ban of end tokens expires."""

    @property
    def only_masks(self) -> bool:
        """Whether each processed row has a grammar and no other params, except penalties."""
        if not len(self.rows) or len(self.masked_rows) < len(self.rows):
            return False
        reported = self.logprobs is not None and self.logprobs.processed_rows is not None
        return not reported and self.bias is None and self.banning_bias is None and self.end_bans is None


class LogitsParamsTable:
    """Logits params of the requests in all slots."""

    def __init__(self, slots: int, vocab: int, upload: Uploader) -> None:
        self.upload = upload
        self.features: NDArray[np.uint8] = np.zeros(slots, np.uint8)
        """Bits of `LogitsFeature` of each slot; 0 for most slots."""
        self.ban_until: Int64 = np.zeros(slots, np.int64)
        self.penalties: Float32 = np.zeros((slots, 3), np.float32)
        self.top_logprobs: Int64 = np.zeros(slots, np.int64)
        self.by_slot: dict[int, SlotLogitsParams] = {}
        self.counts = TokenCounts(slots, vocab, upload)
        self.masks: TokenMasks | None = None
        """Token bitmasks of grammars; the loader sets them on rank 0, other ranks have none."""

    def start_slots(self, starts: tuple[SlotStart, ...]) -> None:
        """Record the logits params of the requests that start in slots."""
        for start in starts:
            if self.features[start.slot]:
                self.free_slot(start.slot)
            if start.options is not None:
                self._start_slot(start, SlotLogitsParams.from_start(start, start.options))

    def free_slot(self, slot: int) -> None:
        """Drop the logits params of a slot."""
        self.features[slot] = 0
        del self.by_slot[slot]
        self.counts.free_slot(slot)
        if self.masks is not None:
            self.masks.free_slot(slot)

    def _start_slot(self, start: SlotStart, params: SlotLogitsParams) -> None:
        """Record the logits params of a request that starts in a slot, if it has any."""
        slot, options = start.slot, start.options
        if not params.features or options is None:
            return
        prompt, output = options.tokens[: options.prompt_tokens], options.tokens[options.prompt_tokens :]
        self.features[slot], self.by_slot[slot] = params.features, params
        self.ban_until[slot], self.top_logprobs[slot] = params.ban_until, params.top_logprobs
        if params.features & LogitsFeature.PENALTIES:
            self.penalties[slot] = params.penalties
            self.counts.start_slot(slot, prompt, output)
        if start.sampling.grammar is not None and self.masks is not None:
            self.masks.start_slot(slot, start.sampling.grammar, output)

    def gather_batch(
        self, slots: Int64, positions: Int64, rows_with_graph_penalties: Int64 | None = None
    ) -> BatchLogitsParams | None:
        """Gather the logits params of a batch; return None if no row has any.

        Args:
            slots: Slot of each batch row, int64 [rows].
            positions: Sequence position of the token to sample for each row, int64 [rows].
            rows_with_graph_penalties: Batch rows whose penalties a sampling kernel applies. For these rows,
                only log probabilities are gathered.
        """
        flags = self.features[slots]
        if rows_with_graph_penalties is not None:
            flags[rows_with_graph_penalties] &= np.uint8(LogitsFeature.LOGPROBS)
        if not flags.any():
            return None
        return BatchLogitsBuilder(self, slots, positions, flags).build()


class BatchLogitsBuilder:
    """Gathers and uploads the logits params of a batch."""

    def __init__(
        self, table: LogitsParamsTable, slots: Int64, positions: Int64, features: NDArray[np.uint8]
    ) -> None:
        self.table = table
        self.batch_slots = slots
        self.batch_features = features
        ban_steps_left = np.where(features & LogitsFeature.END_BAN, table.ban_until[slots] - positions, 0)
        self.rows = np.flatnonzero((features & LASTING_FEATURES).astype(bool) | (ban_steps_left > 0))
        self.slots = slots[self.rows]
        self.features = features[self.rows]
        self.ban_steps_left = ban_steps_left[self.rows]
        """For each processed row, the number of steps for which its end tokens stay banned."""

    def build(self) -> BatchLogitsParams:
        """Upload the params of the batch and return them."""
        upload, by_slot = self.table.upload, self.table.by_slot
        masked_rows = np.flatnonzero(self.features & LogitsFeature.GRAMMAR)
        banned = np.flatnonzero(self.ban_steps_left > 0)
        biased = [
            (row, by_slot[self.slots.item(row)])
            for row in np.flatnonzero(self.features & LogitsFeature.BIAS).tolist()
        ]
        ends = [(row, by_slot[self.slots.item(row)].end_ids) for row in banned.tolist()]
        return BatchLogitsParams(
            rows=self.rows,
            rows_device=upload(self.rows),
            slots=self.slots,
            slots_device=upload(self.slots),
            bias=self.upload_entries([(row, a.bias_ids, a.bias) for row, a in biased]),
            banning_bias=self.upload_bans([(row, a.banned_ids) for row, a in biased]),
            penalties=self.upload_penalties(),
            end_bans=self.upload_bans(ends),
            masked_rows=masked_rows,
            masked_rows_device=upload(masked_rows),
            masked_slots_device=upload(self.slots[masked_rows]),
            logprobs=self.upload_logprob_rows(),
            valid_steps=int(self.ban_steps_left[banned].min()) if len(banned) else UNLIMITED_STEPS,
        )

    def upload_bans(self, parts: list[tuple[int, Int64]]) -> LogitEntries | None:
        """Upload tokens to ban, given as (row, token ids); return None if there is no such token."""
        return self.upload_entries(
            [(row, ids, np.full(len(ids), BANNED_LOGIT, np.float32)) for row, ids in parts]
        )

    def upload_entries(self, parts: list[tuple[int, Int64, NDArray[Any]]]) -> LogitEntries | None:
        """Upload logits to change, given as (row, token ids, values); return None if no logit changes."""
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        upload = self.table.upload
        rows = np.repeat(np.array([row for row, _, _ in parts], np.int64), [len(ids) for _, ids, _ in parts])
        entry_rows, ids = upload.upload_together(rows, np.concatenate([ids for _, ids, _ in parts]))
        values = upload(np.concatenate([values for _, _, values in parts]))
        return LogitEntries(rows=entry_rows, ids=ids, values=values)

    def upload_penalties(self) -> BatchPenalties | None:
        """Upload the penalties of all rows; return None if no row has any."""
        rows = np.flatnonzero(self.features & LogitsFeature.PENALTIES)
        if not len(rows):
            return None
        table, slots = self.table, self.slots[rows]
        rows_device, count_rows = table.upload.upload_together(rows, table.counts.row_by_slot[slots])
        frequency, presence, repetition = table.upload.upload_together(*table.penalties[slots].T)
        return BatchPenalties(
            rows=rows_device,
            count_rows=count_rows,
            frequency=frequency,
            presence=presence,
            repetition=repetition,
        )

    def upload_logprob_rows(self) -> LogprobRows | None:
        """Upload the rows that report log probabilities; return None if no row does."""
        rows = np.flatnonzero(self.batch_features & LogitsFeature.LOGPROBS)
        if not len(rows):
            return None
        table, slots = self.table, self.batch_slots[rows]
        token_ids = [table.by_slot[slot].logprob_token_ids for slot in slots.tolist()]
        return LogprobRows.upload_rows(
            rows, slots, table.top_logprobs[slots], token_ids, self.rows, table.upload
        )
