# SPDX-License-Identifier: Apache-2.0
"""Reads the load of a model's experts from the device, without waiting for it."""

from __future__ import annotations

import torch

from mizzen.core.outputs import ExpertUse
from mizzen.layers.experts.load import ExpertLoad

READ_SECONDS = 10.0
"""Minimum time between two readings."""
MIN_TOKENS = 32
"""Mean number of tokens per expert that a period must have before its ratios are reported."""


class ExpertLoadReader:
    """Computes how unequally tokens are distributed to the experts of each layer."""

    def __init__(self, load: ExpertLoad) -> None:
        """Begin to read; steps before this call, such as those of a warm-up, do not count."""
        device = load.counts.device
        self.load = load
        self.before = load.counts.cpu().clone()
        """Counts when the current period began."""
        self.host = torch.empty_like(self.before, pin_memory=device.type == "cuda")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied: torch.cuda.Event | torch.Event | None = None
        """Event of the copy to `host` that is in progress."""
        self.next_reading = 0.0
        self.dropped_before = self._count_dropped(self.before)
        self.use = ExpertUse(ratios={})

    def read(self, now: float) -> ExpertUse:
        """Return how tokens use the experts of each layer, as far as it is known.

        The ratios are those of the last complete period, in which experts got at least `MIN_TOKENS` tokens in
        the mean. They are between 1 and the number of experts over that of a token. Layers without a complete
        period are missing.

        Args:
            now: Time in monotonic seconds.
        """
        if self.copied is not None:
            if self.copied.query():
                self.copied = None
                self._update_use()
        elif now >= self.next_reading:
            self.next_reading = now + READ_SECONDS
            self._start_copy()
        return self.use

    def _start_copy(self) -> None:
        """Copy the counts to the host, beside the steps. Later steps may already be counted in part."""
        if self.stream is None:
            self.host.copy_(self.load.counts)
            self._update_use()
            return
        with torch.cuda.stream(self.stream):
            self.host.copy_(self.load.counts, non_blocking=True)
        self.copied = self.stream.record_event()

    def _count_dropped(self, counts: torch.Tensor) -> int:
        return int(counts[:, self.load.experts].sum())

    def _update_use(self) -> None:
        dropped = self._count_dropped(self.host) - self.dropped_before
        self.use = ExpertUse(ratios=self.use.ratios, dropped=dropped)
        counts = (self.host - self.before)[:, : self.load.experts].double()
        mean = counts.mean(dim=1)
        if mean.min() < MIN_TOKENS:
            return
        self.before.copy_(self.host)
        ratios = (counts.amax(dim=1) / mean).tolist()
        self.use = ExpertUse(ratios=dict(zip(self.load.layers, ratios, strict=True)), dropped=dropped)
