"""What the slots of a batch ask: biases, penalties, end bans, grammars, log probabilities.

Most requests ask for none of it, and then nothing here runs but a look at one host array. What a slot asks is
kept on the host; what a batch of slots asks is gathered once for as long as the batch stays the same. The one
thing on the device is how often each slot that is penalised has seen each token: 4 bytes a token of the
vocabulary and slot, allocated when the first such request comes and doubled as more run at once (at 256 slots
and a vocabulary of 152,000: 156 MB).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.core.request import Int64
from mizzen.core.step_plan import Float32, SlotStart
from mizzen.engine.sampling.logits_params import Ask, SlotAsks, TokenCounts, TokenMasks, Upload
from mizzen.engine.sampling.logprobs import LogprobRows

BANNED = -1e30
"""Logit of a token that is not to be drawn while there is any other. Finite, so that temperatures keep it."""
LASTING = int(Ask.BIAS | Ask.PENALTIES | Ask.GRAMMAR)
"""Bits of slots that draw from other logits than the model's as long as they run."""
FOREVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Single logits of processed rows: row, token, and a number of each, all [n] on the device."""

    rows: torch.Tensor
    ids: torch.Tensor
    numbers: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Processed rows that are penalised, all [n] on the device."""

    rows: torch.Tensor
    counts: torch.Tensor
    """Their rows in `TokenCounts`."""
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchExtras:
    """What the rows of a batch ask, on the device. Good while the batch and its order stay."""

    rows: Int64
    """Rows that draw from processed logits, ascending."""
    index: torch.Tensor
    """The same on the device."""
    slots: Int64
    """Their slots."""
    slots_index: torch.Tensor
    """The same on the device."""
    bias: Entries | None
    """Added."""
    set_bias: Entries | None
    """Biases that ban, and so are set."""
    penalties: Penalties | None
    bans: Entries | None
    """End tokens."""
    masked: Int64
    """Processed rows that have a grammar."""
    masked_index: torch.Tensor
    """The same on the device."""
    masked_slots: torch.Tensor
    """Their slots, on the device."""
    logprobs: LogprobRows | None
    steps: int
    """It is good for so many steps: then a ban ends."""

    @property
    def masks_alone(self) -> bool:
        """Tell whether each of these rows has a grammar, and nothing else but penalties and a temperature."""
        if not len(self.rows) or len(self.masked) < len(self.rows):
            return False
        reported = self.logprobs is not None and self.logprobs.processed is not None
        return not reported and self.bias is None and self.set_bias is None and self.bans is None


class SlotExtras:
    """What each slot asks."""

    def __init__(self, slots: int, vocab: int, upload: Upload) -> None:
        self.upload = upload
        self.flags: NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.ban_until: Int64 = np.zeros(slots, np.int64)
        self.penalties: Float32 = np.zeros((slots, 3), np.float32)
        self.tops: Int64 = np.zeros(slots, np.int64)
        self.asks: dict[int, SlotAsks] = {}
        self.counts = TokenCounts(slots, vocab, upload)
        self.masks: TokenMasks | None = None
        """Set by whoever compiles grammars."""

    def start(self, starts: tuple[SlotStart, ...]) -> None:
        """Take note of what requests ask that take slots."""
        for start in starts:
            if self.flags[start.slot]:
                self.release(start.slot)
            if start.asks is not None:
                self.take(start, SlotAsks.of(start, start.asks))

    def release(self, slot: int) -> None:
        """Forget what a slot asked."""
        self.flags[slot] = 0
        del self.asks[slot]
        self.counts.release(slot)
        if self.masks is not None:
            self.masks.release(slot)

    def take(self, start: SlotStart, asks: SlotAsks) -> None:
        """Take note of what a request asks of a slot."""
        slot, known = start.slot, start.asks
        if not asks.flags or known is None:
            return
        prompt, output = known.tokens[: known.prompt_tokens], known.tokens[known.prompt_tokens :]
        self.flags[slot], self.asks[slot] = asks.flags, asks
        self.ban_until[slot], self.tops[slot] = asks.ban_until, asks.top
        if asks.flags & Ask.PENALTIES:
            self.penalties[slot] = asks.penalties
            self.counts.start(slot, prompt, output)
        if start.sampling.grammar is not None and self.masks is not None:
            self.masks.start(slot, start.sampling.grammar, output)

    def batch(self, slots: Int64, positions: Int64, within: Int64 | None = None) -> BatchExtras | None:
        """Return what a batch asks (its slots, and the positions of the tokens to be drawn), or None.

        Rows `within` are penalised where they are drawn, and ask for log probabilities alone here.
        """
        flags = self.flags[slots]
        if within is not None:
            flags[within] &= np.uint8(Ask.LOGPROBS)
        if not flags.any():
            return None
        return Gather(self, slots, positions, flags).batch()


class Gather:
    """Gathers what the rows of a batch ask."""

    def __init__(self, extras: SlotExtras, slots: Int64, positions: Int64, flags: NDArray[np.uint8]) -> None:
        self.extras = extras
        self.batch_slots = slots
        self.batch_flags = flags
        left = np.where(flags & Ask.END_BAN, extras.ban_until[slots] - positions, 0)
        self.rows = np.flatnonzero((flags & LASTING).astype(bool) | (left > 0))
        self.slots = slots[self.rows]
        self.flags = flags[self.rows]
        self.left = left[self.rows]
        """For how many steps each row's end tokens are banned."""

    def batch(self) -> BatchExtras:
        """Return what they ask."""
        upload, asks = self.extras.upload, self.extras.asks
        masked = np.flatnonzero(self.flags & Ask.GRAMMAR)
        banned = np.flatnonzero(self.left > 0)
        biased = [(row, asks[self.slots.item(row)]) for row in np.flatnonzero(self.flags & Ask.BIAS).tolist()]
        ends = [(row, asks[self.slots.item(row)].end_ids) for row in banned.tolist()]
        return BatchExtras(
            rows=self.rows,
            index=upload(self.rows),
            slots=self.slots,
            slots_index=upload(self.slots),
            bias=self.entries([(row, a.bias_ids, a.bias) for row, a in biased]),
            set_bias=self.bans([(row, a.banned_ids) for row, a in biased]),
            penalties=self.penalties(),
            bans=self.bans(ends),
            masked=masked,
            masked_index=upload(masked),
            masked_slots=upload(self.slots[masked]),
            logprobs=self.logprobs(),
            steps=int(self.left[banned].min()) if len(banned) else FOREVER,
        )

    def bans(self, parts: list[tuple[int, Int64]]) -> Entries | None:
        """Upload tokens that are banned: row and ids."""
        return self.entries([(row, ids, np.full(len(ids), BANNED, np.float32)) for row, ids in parts])

    def entries(self, parts: list[tuple[int, Int64, NDArray[Any]]]) -> Entries | None:
        """Upload single logits: row, ids and numbers."""
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        upload = self.extras.upload
        rows = np.repeat(np.array([row for row, _, _ in parts], np.int64), [len(ids) for _, ids, _ in parts])
        where, ids = upload.each(rows, np.concatenate([ids for _, ids, _ in parts]))
        numbers = upload(np.concatenate([numbers for _, _, numbers in parts]))
        return Entries(rows=where, ids=ids, numbers=numbers)

    def penalties(self) -> Penalties | None:
        """Upload the penalties of the rows that have some."""
        rows = np.flatnonzero(self.flags & Ask.PENALTIES)
        if not len(rows):
            return None
        extras, slots = self.extras, self.slots[rows]
        where, counts = extras.upload.each(rows, extras.counts.rows[slots])
        frequency, presence, repetition = extras.upload.each(*extras.penalties[slots].T)
        return Penalties(
            rows=where, counts=counts, frequency=frequency, presence=presence, repetition=repetition
        )

    def logprobs(self) -> LogprobRows | None:
        """Upload which rows report log probabilities, and of what."""
        rows = np.flatnonzero(self.batch_flags & Ask.LOGPROBS)
        if not len(rows):
            return None
        extras, slots = self.extras, self.batch_slots[rows]
        by_id = [extras.asks[slot].by_id for slot in slots.tolist()]
        return LogprobRows.of(rows, slots, extras.tops[slots], by_id, self.rows, extras.upload)
