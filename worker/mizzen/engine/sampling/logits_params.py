"""What one slot asks beyond temperature and filters, and how often slots have seen each token."""

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
from mizzen.core.step_plan import Asks, Float32, SlotStart

PROMPT = 1 << 30
"""Bit of a token's count that says that the prompt holds it; the bits below count the output."""
MIN_BIAS = -100.0
"""A bias that bans."""
FIRST_ROWS = 8


class Ask(enum.IntFlag):
    """Bits of what a slot asks."""

    BIAS = 1
    PENALTIES = 2
    END_BAN = 4
    GRAMMAR = 8
    LOGPROBS = 16


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
        """Return bitmasks int32 [any, ceil(vocab / 32)] on the device, with rows by slot.

        Those of `slots` are right: bit t % 32 of word t // 32 tells whether token t may be drawn at the
        slot's sequence position. Called once a step, when the model's work is enqueued: it may wait for the
        tokens of the steps before.
        """
        ...

    def applied(self) -> None:
        """Note that all that reads the bitmasks of a step is enqueued."""
        ...


class Upload(Protocol):
    """Brings host arrays to the device; see `mizzen.engine.execution.slot_state.Uploader`."""

    device: torch.device

    def __call__(self, array: NDArray[Any]) -> torch.Tensor: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAsks:
    """What one slot asks."""

    flags: int
    bias_ids: Int64
    bias: Float32
    banned_ids: Int64
    """Tokens whose bias bans them."""
    end_ids: Int64
    ban_until: int
    """End tokens are banned at sequence positions below this."""
    penalties: tuple[float, float, float]
    """Frequency, presence, repetition."""
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
        bias = dict(sampling.logit_bias)
        ids, values = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        adds = values > MIN_BIAS
        flags = Ask.BIAS * bool(bias)
        flags |= Ask.PENALTIES * (penalties != (0.0, 0.0, 1.0))
        flags |= Ask.END_BAN * bans
        flags |= Ask.GRAMMAR * (sampling.grammar is not None)
        flags |= Ask.LOGPROBS * (sampling.logprobs is not None)
        return cls(
            flags=int(flags),
            bias_ids=ids[adds],
            bias=values[adds],
            banned_ids=ids[~adds],
            end_ids=np.array(asks.end_tokens if bans else (), np.int64),
            ban_until=ban_until if bans else 0,
            penalties=penalties,
            top=sampling.logprobs or 0,
            by_id=np.array(sampling.logprob_token_ids, np.int64),
        )


class TokenCounts:
    """How often each slot that is penalised has seen each token, int32 [rows, vocab]."""

    def __init__(self, slots: int, vocab: int, upload: Upload) -> None:
        self.vocab = vocab
        self.upload = upload
        self.rows: Int64 = np.full(slots, -1, np.int64)
        """The row of each slot that has one, else -1; it keeps it until another request starts there."""
        self.free: list[int] = []
        self.table = torch.empty((0, vocab), dtype=torch.int32, device=upload.device)

    def start(self, slot: int, prompt: Int32, output: Int32) -> None:
        """Count what a request knows when it takes a slot; the slot has no row."""
        if not self.free:
            self.grow()
        place = self.free.pop()
        self.rows[slot] = place
        row = self.table[place]
        row.zero_()
        if len(prompt):
            row.index_fill_(0, self.upload(np.unique(prompt).astype(np.int64)), PROMPT)  # `row[...] =` waits
        if len(output):
            ids, counts = np.unique(output, return_counts=True)
            row[self.upload(ids.astype(np.int64))] += self.upload(counts.astype(np.int32))

    def release(self, slot: int) -> None:
        """Take a slot's row back, if it has one."""
        row = self.rows.item(slot)
        if row >= 0:
            self.free.append(row)
            self.rows[slot] = -1

    def grow(self) -> None:
        """Double the rows."""
        held = len(self.table)
        count = min(max(FIRST_ROWS, 2 * held), len(self.rows))
        table = torch.empty((count, self.vocab), dtype=torch.int32, device=self.upload.device)
        table[:held] = self.table
        self.table = table
        self.free += range(count - 1, held - 1, -1)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one token for each of distinct rows, both int64 [n]."""
        self.table[rows, tokens] += 1
