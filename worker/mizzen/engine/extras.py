"""What slots ask beyond temperature and filters: biases, penalties, end bans, grammars, log probabilities.

Most requests ask for none of it, and then nothing here runs but a look at one host array. What a slot asks is
kept on the host; what a batch of slots asks is gathered once for as long as the batch stays the same. The one
thing on the device is how often each slot that is penalised has seen each token: 4 bytes a token of the
vocabulary and slot, allocated when the first such request comes and doubled as more run at once (at 256 slots
and a vocabulary of 152,000: 156 MB).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mizzen.core.params import Grammar
from mizzen.core.plan import Asks, SlotStart
from mizzen.core.request import Int32, Int64

Float32 = NDArray[np.float32]

PROMPT = 1 << 30
"""Bit of a token's count that says that the prompt holds it; the bits below count the output."""
BANNED = -1e30
"""Logit of a token that is not to be drawn while there is any other. Finite, so that temperatures keep it."""
MIN_BIAS = -100.0
"""A bias that bans."""
FIRST_ROWS = 8
NO_IDS: Int64 = np.empty(0, np.int64)
FOREVER = 1 << 62


class Ask(enum.IntFlag):
    """Bits of what a slot asks."""

    BIAS = 1
    PENALTIES = 2
    END_BAN = 4
    GRAMMAR = 8
    LOGPROBS = 16


PROCESSED = Ask.BIAS | Ask.PENALTIES | Ask.END_BAN | Ask.GRAMMAR
"""Bits of slots that draw from other logits than the model's."""


class TokenMasks(Protocol):
    """Where grammars say which tokens may be drawn."""

    @property
    def active(self) -> bool:
        """Tell whether any slot has a grammar."""
        ...

    def start(self, slot: int, grammar: Grammar, output: Int32) -> None:
        """Let a request take a slot, with the output tokens [n] that it has already."""
        ...

    def release(self, slot: int) -> None:
        """Forget a slot's request."""
        ...

    def sampled(self, slots: Int64, tokens: Callable[[], NDArray[Any]]) -> None:
        """Take note of a launched step: `tokens` waits for the one of each slot of `slots` [rows]."""
        ...

    def bits(self, slots: Int64, positions: Int64) -> torch.Tensor:
        """Return a bitmask int32 [slots, ceil(vocab / 32)] on the device, for slots that have a grammar.

        Bit t % 32 of word t // 32 tells whether token t may be drawn at the slot's sequence position. Called
        once a step, when the model's work is enqueued: it may wait for the tokens of the steps before.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAsks:
    """What one slot asks."""

    flags: int
    bias_ids: Int64
    bias: Float32
    end_ids: Int64
    ban_until: int
    """End tokens are banned at sequence positions below this."""
    frequency: float
    presence: float
    repetition: float
    top: int
    """Most probable tokens to report."""
    by_id: Int64
    """Tokens to report."""

    @classmethod
    def of(cls, start: SlotStart, asks: Asks) -> SlotAsks:
        """Read what a request asks."""
        sampling = start.sampling
        penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
        ban_until = asks.prompt_tokens + sampling.min_tokens
        bans = ban_until > len(asks.tokens) and len(asks.end_tokens) > 0
        ids, values = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
        flags = Ask.BIAS * bool(ids)
        flags |= Ask.PENALTIES * (penalties != (0.0, 0.0, 1.0))
        flags |= Ask.END_BAN * bans
        flags |= Ask.GRAMMAR * (sampling.grammar is not None)
        flags |= Ask.LOGPROBS * (sampling.logprobs is not None)
        return cls(
            flags=int(flags),
            bias_ids=np.array(ids, np.int64),
            bias=np.array(values, np.float32),
            end_ids=np.array(asks.end_tokens, np.int64) if bans else NO_IDS,
            ban_until=ban_until,
            frequency=penalties[0],
            presence=penalties[1],
            repetition=penalties[2],
            top=sampling.logprobs or 0,
            by_id=np.array(sampling.logprob_token_ids, np.int64),
        )


class Upload(Protocol):
    """Brings host arrays to the device; see `mizzen.engine.state.Uploader`."""

    device: torch.device

    def __call__(self, array: NDArray[Any]) -> torch.Tensor: ...  # noqa: D102


class TokenCounts:
    """How often each slot that is penalised has seen each token, int32 [rows, vocab]."""

    def __init__(self, slots: int, vocab: int, upload: Upload) -> None:
        self.vocab = vocab
        self.upload = upload
        self.rows: dict[int, int] = {}
        """The row of each slot that has one; it keeps it until another request starts there."""
        self.free: list[int] = []
        self.most = slots
        self.table = torch.empty((0, vocab), dtype=torch.int32, device=upload.device)

    def start(self, slot: int, tokens: Int32, prompt_tokens: int) -> None:
        """Count what a request knows when it takes a slot; the slot has no row."""
        if not self.free:
            self.grow()
        self.rows[slot] = self.free.pop()
        row = self.table[self.rows[slot]]
        row.zero_()
        output, counts = np.unique(tokens[prompt_tokens:], return_counts=True)
        row[self.upload(np.unique(tokens[:prompt_tokens]).astype(np.int64))] = PROMPT
        row[self.upload(output.astype(np.int64))] += self.upload(counts.astype(np.int32))

    def release(self, slot: int) -> None:
        """Take a slot's row back, if it has one."""
        row = self.rows.pop(slot, None)
        if row is not None:
            self.free.append(row)

    def grow(self) -> None:
        """Double the rows."""
        held = len(self.table)
        count = min(max(FIRST_ROWS, 2 * held), self.most)
        table = torch.empty((count, self.vocab), dtype=torch.int32, device=self.upload.device)
        table[:held] = self.table
        self.table = table
        self.free += range(count - 1, held - 1, -1)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one token for each of distinct rows, both int64 [n]."""
        self.table[rows, tokens] += 1


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
class LogprobRows:
    """Rows of a batch whose log probabilities are reported."""

    rows: torch.Tensor
    """int64 [n] on the device."""
    slots: tuple[int, ...]
    tops: tuple[int, ...]
    widest: int
    """Of `tops`."""
    named: tuple[int, ...]
    """How many tokens each row asks for by id."""
    by_id: torch.Tensor
    """int64 [n, most of `named`] on the device, padded with 0."""
    processed: tuple[torch.Tensor, torch.Tensor] | None
    """Which of these rows draw from processed logits, and where those stand among them."""


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
    logprobs: LogprobRows | None
    steps: int
    """It is good for so many steps: then a ban ends."""


class SlotExtras:
    """What each slot asks."""

    def __init__(self, slots: int, vocab: int, upload: Upload) -> None:
        self.upload = upload
        self.flags: NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.asks: dict[int, SlotAsks] = {}
        self.counts = TokenCounts(slots, vocab, upload)
        self.masks: TokenMasks | None = None
        """Set by whoever compiles grammars."""

    def start(self, starts: tuple[SlotStart, ...]) -> None:
        """Take note of what requests ask that take slots."""
        for start in starts:
            slot = start.slot
            if self.flags[slot]:
                self.flags[slot] = 0
                del self.asks[slot]
                self.counts.release(slot)
                if self.masks is not None:
                    self.masks.release(slot)
            if start.asks is None:
                continue
            asks = SlotAsks.of(start, start.asks)
            if not asks.flags:
                continue
            self.flags[slot] = asks.flags
            self.asks[slot] = asks
            if asks.flags & Ask.PENALTIES:
                self.counts.start(slot, start.asks.tokens, start.asks.prompt_tokens)
            if start.sampling.grammar is not None and self.masks is not None:
                output = start.asks.tokens[start.asks.prompt_tokens :]
                self.masks.start(slot, start.sampling.grammar, output)

    def batch(self, slots: Int64, positions: Int64) -> BatchExtras | None:
        """Return what a batch asks (its slots, and the positions of the tokens to be drawn), or None."""
        flags = self.flags[slots]
        if not flags.any():
            return None
        return Gather(self, slots, positions, flags).batch()


@dataclass(slots=True)
class Gather:
    """Gathers what the rows of a batch ask."""

    extras: SlotExtras
    slots: Int64
    positions: Int64
    flags: NDArray[np.uint8]
    rows: Int64 = field(init=False)
    asks: list[SlotAsks] = field(init=False)

    def __post_init__(self) -> None:
        flags = self.flags & int(PROCESSED)
        over = flags == Ask.END_BAN  # nothing but a ban, which may have ended
        if over.any():
            for row in np.flatnonzero(over).tolist():
                asks = self.extras.asks[int(self.slots[row])]
                flags[row] *= asks.ban_until > self.positions[row]
        self.rows = np.flatnonzero(flags)
        self.asks = [self.extras.asks[slot] for slot in self.slots[self.rows].tolist()]

    def batch(self) -> BatchExtras:
        """Return what they ask."""
        upload = self.extras.upload
        bans = [(i, a) for i, a in enumerate(self.asks) if a.ban_until > self.positions[self.rows[i]]]
        bans = [(i, a) for i, a in bans if a.flags & Ask.END_BAN]
        left = [a.ban_until - int(self.positions[self.rows[i]]) for i, a in bans]
        masked = np.array([i for i, a in enumerate(self.asks) if a.flags & Ask.GRAMMAR], np.int64)
        bias = [(i, a.bias_ids, a.bias, a.bias > MIN_BIAS) for i, a in enumerate(self.asks)]
        return BatchExtras(
            rows=self.rows,
            index=upload(self.rows),
            slots=self.slots[self.rows],
            slots_index=upload(self.slots[self.rows]),
            bias=self.entries([(i, ids[adds], values[adds]) for i, ids, values, adds in bias]),
            set_bias=self.entries(
                [(i, ids[~adds], np.full_like(values[~adds], BANNED)) for i, ids, values, adds in bias]
            ),
            penalties=self.penalties(),
            bans=self.entries([(i, a.end_ids, np.full(len(a.end_ids), BANNED, np.float32)) for i, a in bans]),
            masked=masked,
            masked_index=upload(masked),
            logprobs=self.logprobs(),
            steps=min(left, default=FOREVER),
        )

    def entries(self, parts: list[tuple[int, Int64, NDArray[Any]]]) -> Entries | None:
        """Upload single logits: row, ids and numbers."""
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        upload = self.extras.upload
        rows = np.repeat([row for row, _, _ in parts], [len(ids) for _, ids, _ in parts])
        packed = upload(np.stack([rows.astype(np.int64), np.concatenate([ids for _, ids, _ in parts])]))
        numbers = upload(np.concatenate([numbers for _, _, numbers in parts]))
        return Entries(rows=packed[0], ids=packed[1], numbers=numbers)

    def penalties(self) -> Penalties | None:
        """Upload the penalties of the rows that have some."""
        found = [(i, a) for i, a in enumerate(self.asks) if a.flags & Ask.PENALTIES]
        if not found:
            return None
        upload, held = self.extras.upload, self.extras.counts.rows
        slots = self.slots[self.rows]
        places = [[i for i, _ in found], [held[int(slots[i])] for i, _ in found]]
        numbers = [[a.frequency, a.presence, a.repetition] for _, a in found]
        index, values = upload(np.array(places, np.int64)), upload(np.array(numbers, np.float32).T)
        return Penalties(
            rows=index[0], counts=index[1], frequency=values[0], presence=values[1], repetition=values[2]
        )

    def logprobs(self) -> LogprobRows | None:
        """Upload which rows report log probabilities, and of what."""
        rows = np.flatnonzero(self.flags & Ask.LOGPROBS)
        if not len(rows):
            return None
        upload, slots = self.extras.upload, tuple(self.slots[rows].tolist())
        asks = [self.extras.asks[slot] for slot in slots]
        named = tuple(len(a.by_id) for a in asks)
        by_id = np.zeros((len(rows), max(named)), np.int64)
        for i, a in enumerate(asks):
            by_id[i, : len(a.by_id)] = a.by_id
        processed = np.flatnonzero(np.isin(rows, self.rows))
        where = None
        if len(processed):
            where = upload(processed), upload(np.searchsorted(self.rows, rows[processed]))
        return LogprobRows(
            rows=upload(rows),
            slots=slots,
            tops=tuple(a.top for a in asks),
            widest=max(a.top for a in asks),
            named=named,
            by_id=upload(by_id),
            processed=where,
        )
