"""Logits params: bias, penalties, end bans, grammars and log probabilities, per slot and per batch.

Most requests have none of them; then a batch costs one look at a host array. Params of slots stay on the
host; `gather_batch` uploads those of a batch once for as long as the batch stays the same. `SlotState` owns
the `LogitsParamsTable`; the sampler and decode graphs read the batches.
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
"""Logit of a token that must not be sampled while any other is possible. Finite, so dividing by a temperature
keeps it.
"""
UNLIMITED_STEPS = 1 << 62
"""Number of steps that stands for no limit."""


class LogitsFeature(enum.IntFlag):
    """Features of a slot's request, as bits."""

    BIAS = 1
    PENALTIES = 2
    END_BAN = 4
    GRAMMAR = 8
    LOGPROBS = 16


LASTING_FEATURES = int(LogitsFeature.BIAS | LogitsFeature.PENALTIES | LogitsFeature.GRAMMAR)
"""Features for which a slot's logits are processed as long as its request runs."""


class TokenMasks(Protocol):
    """Provides the tokens that grammars allow."""

    @property
    def active(self) -> bool:
        """Return whether any slot has a grammar."""
        ...

    def start_slot(self, slot: int, grammar: Grammar, output: Int32) -> None:
        """Start a request in a slot, with the output tokens [n] that it has already."""
        ...

    def free_slot(self, slot: int) -> None:
        """Drop a slot's request."""
        ...

    def add_launched_step(self, slots: Int64, tokens: Callable[[], NDArray[Any]]) -> None:
        """Record a launched step: `tokens` waits for the sampled token of each slot in `slots` [rows]."""
        ...

    def update_bitmasks(self, slots: Int64, positions: Int64) -> torch.Tensor:
        """Return bitmasks int32 [any, ceil(vocab / 32)] on the device, with rows indexed by slot.

        Only the rows of `slots` are valid: bit t % 32 of word t // 32 tells whether token t may be sampled at
        the slot's sequence position. Called once per step, after the model's work is enqueued; it may wait
        for the tokens of previous steps.
        """
        ...

    def mark_applied(self) -> None:
        """Record that all work that reads a step's bitmasks is enqueued."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLogitsParams:
    """Logits params of one slot."""

    features: int
    bias_ids: Int64
    bias: Float32
    banned_ids: Int64
    """Tokens that the bias bans."""
    end_ids: Int64
    ban_until: int
    """End tokens are banned at sequence positions below this."""
    penalties: tuple[float, float, float]
    """Frequency, presence and repetition penalty."""
    top_logprobs: int
    """Number of most probable tokens to report."""
    logprob_token_ids: Int64
    """Token ids whose log probabilities to report."""

    @classmethod
    def from_start(cls, start: SlotStart, options: SlotOptions) -> SlotLogitsParams:
        """Read the params of a request that starts in a slot."""
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
    """Single logits of processed rows: row, token id and value, each [n] on the device."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPenalties:
    """Penalized rows among the processed ones, each tensor [n] on the device."""

    rows: torch.Tensor
    count_rows: torch.Tensor
    """Their rows in `TokenCounts`."""
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLogitsParams:
    """Logits params of a batch, on the device. Valid while the batch and its order stay the same."""

    rows: Int64
    """Batch rows whose logits are processed, ascending."""
    rows_device: torch.Tensor
    """`rows` on the device."""
    slots: Int64
    """Slots of `rows`."""
    slots_device: torch.Tensor
    """`slots` on the device."""
    bias: LogitEntries | None
    """Biases to add to logits."""
    banning_bias: LogitEntries | None
    """Biases that ban tokens; their logits are set."""
    penalties: BatchPenalties | None
    end_bans: LogitEntries | None
    """End tokens banned until min_tokens is reached."""
    masked_rows: Int64
    """Indices within `rows` of those with a grammar."""
    masked_rows_device: torch.Tensor
    """`masked_rows` on the device."""
    masked_slots_device: torch.Tensor
    """Slots of `masked_rows`, on the device."""
    logprobs: LogprobRows | None
    valid_steps: int
    """Number of steps for which these params are valid; then an end ban expires."""

    @property
    def only_masks(self) -> bool:
        """Return whether every processed row has a grammar and otherwise only penalties and temperature."""
        if not len(self.rows) or len(self.masked_rows) < len(self.rows):
            return False
        reported = self.logprobs is not None and self.logprobs.processed_rows is not None
        return not reported and self.bias is None and self.banning_bias is None and self.end_bans is None


class LogitsParamsTable:
    """Logits params by slot."""

    def __init__(self, slots: int, vocab: int, upload: Uploader) -> None:
        self.upload = upload
        self.features: NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.ban_until: Int64 = np.zeros(slots, np.int64)
        self.penalties: Float32 = np.zeros((slots, 3), np.float32)
        self.top_logprobs: Int64 = np.zeros(slots, np.int64)
        self.by_slot: dict[int, SlotLogitsParams] = {}
        self.counts = TokenCounts(slots, vocab, upload)
        self.masks: TokenMasks | None = None
        """Grammar masks; set by the loader if grammars are supported."""

    def start_slots(self, starts: tuple[SlotStart, ...]) -> None:
        """Record the params of requests that start in a slot."""
        for start in starts:
            if self.features[start.slot]:
                self.free_slot(start.slot)
            if start.options is not None:
                self._start_slot(start, SlotLogitsParams.from_start(start, start.options))

    def free_slot(self, slot: int) -> None:
        """Drop a slot's params."""
        self.features[slot] = 0
        del self.by_slot[slot]
        self.counts.free_slot(slot)
        if self.masks is not None:
            self.masks.free_slot(slot)

    def _start_slot(self, start: SlotStart, params: SlotLogitsParams) -> None:
        """Record the params of one request."""
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
        """Return the logits params of a batch, or None if its logits need neither processing nor reports.

        Args:
            slots: Slots of the batch's rows.
            positions: Sequence positions of the tokens to sample.
            rows_with_graph_penalties: Rows whose penalties the sampling kernel applies; of these, only
                log probabilities are gathered.
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
        """Number of steps for which each processed row's end tokens stay banned."""

    def build(self) -> BatchLogitsParams:
        """Return the batch's params."""
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
        """Upload tokens to ban: row and token ids."""
        return self.upload_entries(
            [(row, ids, np.full(len(ids), BANNED_LOGIT, np.float32)) for row, ids in parts]
        )

    def upload_entries(self, parts: list[tuple[int, Int64, NDArray[Any]]]) -> LogitEntries | None:
        """Upload single logits: row, token ids and values."""
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        upload = self.table.upload
        rows = np.repeat(np.array([row for row, _, _ in parts], np.int64), [len(ids) for _, ids, _ in parts])
        entry_rows, ids = upload.upload_together(rows, np.concatenate([ids for _, ids, _ in parts]))
        values = upload(np.concatenate([values for _, _, values in parts]))
        return LogitEntries(rows=entry_rows, ids=ids, values=values)

    def upload_penalties(self) -> BatchPenalties | None:
        """Upload the penalties of the rows that have any."""
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
        """Upload the rows that report log probabilities, and their requests."""
        rows = np.flatnonzero(self.batch_features & LogitsFeature.LOGPROBS)
        if not len(rows):
            return None
        table, slots = self.table, self.batch_slots[rows]
        token_ids = [table.by_slot[slot].logprob_token_ids for slot in slots.tolist()]
        return LogprobRows.upload_rows(
            rows, slots, table.top_logprobs[slots], token_ids, self.rows, table.upload
        )
