"""Prompts that are looked at themselves: their tokens' log probabilities, and their pooled hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from mizzen.core.request import Int64, Pooling
from mizzen.core.step_plan import Asks, PrefillChunk, SlotStart, StepPlan
from mizzen.engine.execution.slot_state import Uploader
from mizzen.engine.sampling.logprobs import table
from mizzen.engine.sampling.side_outputs import DeviceSide, LogprobTensors, Owner, packed
from mizzen.models.decoder import Decoder

LOGIT_ROWS = 128
"""Rows whose logits are computed at a time: a chunk's all together would take gigabytes."""


@dataclass(frozen=True, slots=True)
class Read:
    """A chunk that is looked at."""

    chunk: PrefillChunk
    asks: Asks
    first: int
    """Of the rows of the chunk whose hidden states are needed."""
    count: int

    @classmethod
    def of(cls, chunk: PrefillChunk, asks: Asks) -> Read | None:
        """Return what is looked at in a chunk, if anything is."""
        size = len(chunk.tokens)
        if asks.pooling is Pooling.LAST:
            return cls(chunk, asks, size - 1, 1) if chunk.last else None
        if asks.pooling is None:
            # A hidden state tells of the token behind it; the prompt's last one tells of the output.
            size = min(size, asks.prompt_tokens - 1 - chunk.start)
        return cls(chunk, asks, 0, size) if size > 0 else None


class Prompts:
    """Slots whose prompt is looked at."""

    def __init__(self, model: Decoder, upload: Uploader) -> None:
        self.model = model
        self.upload = upload
        self.asks: dict[int, Asks] = {}
        self.sums: dict[int, torch.Tensor] = {}
        """Of the hidden states of prompts whose mean is asked for, float32 [hidden], by slot."""

    def start(self, starts: tuple[SlotStart, ...]) -> None:
        """Take note of what requests ask that take slots."""
        for start in starts:
            slot, asks = start.slot, start.asks
            self.sums.pop(slot, None)
            if asks is not None and (asks.pooling is not None or asks.prompt_logprobs is not None):
                self.asks[slot] = asks
            else:
                self.asks.pop(slot, None)

    def reads(self, plan: StepPlan) -> list[Read]:
        """Return the chunks of a plan that are looked at."""
        if not self.asks:
            return []
        found = [(chunk, self.asks.get(chunk.slot)) for chunk in plan.prefill]
        reads = [Read.of(chunk, asks) for chunk, asks in found if asks is not None]
        return [read for read in reads if read is not None]

    def rows(self, plan: StepPlan, reads: list[Read]) -> Int64:
        """Return the rows of a plan's batch that they need, one read after the other."""
        sizes = [len(plan.decode), *(len(chunk.tokens) for chunk in plan.prefill)]
        begins = dict(zip((chunk.slot for chunk in plan.prefill), np.cumsum(sizes).tolist(), strict=False))
        runs = [(begins[read.chunk.slot] + read.first, read.count) for read in reads]
        return np.concatenate([np.arange(begin, begin + count) for begin, count in runs])

    def __call__(self, reads: list[Read], hidden: torch.Tensor) -> DeviceSide:
        """Look at the hidden states of the rows that `rows` named, [rows, hidden]."""
        logprobs: list[LogprobTensors] = []
        slots: list[int] = []
        vectors: list[torch.Tensor] = []
        begin = 0
        for read in reads:
            part = hidden[begin : begin + read.count]
            begin += read.count
            if read.asks.pooling is None:
                logprobs.append(self.logprobs(read, part))
                continue
            vector = self.pooled(read, part)
            if vector is not None:
                slots.append(read.chunk.slot)
                vectors.append(vector)
        return DeviceSide(
            logprobs=tuple(logprobs), slots=tuple(slots), vectors=torch.stack(vectors) if vectors else None
        )

    def logprobs(self, read: Read, hidden: torch.Tensor) -> LogprobTensors:
        """Return the log probabilities of the tokens behind a chunk's positions, as the model gives them."""
        position = read.chunk.start + 1
        known = read.asks.tokens[position : position + read.count]
        top, targets = read.asks.prompt_logprobs or 0, self.upload(known.astype(np.int64))
        parts = [
            table(self.model.logits(rows).float(), tokens, top)
            for rows, tokens in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
        ]
        ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
        owner = Owner(slot=read.chunk.slot, rows=read.count, top=top, named=0, start=position)
        return LogprobTensors(owners=(owner,), widest=ids.shape[1] - 1, packed=packed(ids, values))

    def pooled(self, read: Read, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return a prompt's vector, float32 [hidden], with its last chunk; None before."""
        chunk, states = read.chunk, self.model.norm(hidden).float()
        if read.asks.pooling is Pooling.LAST:
            vector = states[0]
        else:
            vector = states.sum(dim=0)
            if chunk.slot in self.sums:
                vector += self.sums.pop(chunk.slot)
            if not chunk.last:
                self.sums[chunk.slot] = vector
                return None
            vector = vector / (chunk.start + len(chunk.tokens))
        return F.normalize(vector, dim=0) if read.asks.normalize else vector
