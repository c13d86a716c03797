"""Penalties by slot on the device, where captured steps read them: a batch's rows are looked up by none."""

from __future__ import annotations

import numpy as np
import torch

from mizzen.core.request import Int64
from mizzen.engine.execution.slot_state import Column
from mizzen.engine.sampling.logits_params import Ask
from mizzen.engine.sampling.slot_params import SlotExtras

NONE = -1


class SlotPenalties:
    """Which slots captured steps penalise, and how; see `mizzen.kernels.sampling.draw.Processing`."""

    def __init__(self, extras: SlotExtras, slots: int) -> None:
        """Allocate `slots` rows, the one of padding among them."""
        self._extras = extras
        self._places = Column(np.full(slots, NONE, np.int64), extras.upload)
        self._values = Column(np.zeros((slots, 3), np.float32), extras.upload)
        self.counts = torch.zeros(1, dtype=torch.int64, device=extras.upload.device)
        self._address = 0

    @property
    def places(self) -> torch.Tensor:
        """int64 [slots]."""
        return self._places.device

    @property
    def values(self) -> torch.Tensor:
        """float32 [slots, 3]."""
        return self._values.device

    def within(self, slots: Int64, apart: Int64) -> Int64:
        """Return the rows of a batch that are penalised where they are drawn: nothing else is done to them.

        `apart` are rows that are not drawn by a kernel.
        """
        alone = self._extras.flags[slots] & ~np.uint8(Ask.LOGPROBS) == Ask.PENALTIES
        alone[apart] = False
        return np.flatnonzero(alone)

    def set(self, slots: Int64, within: Int64) -> None:
        """Have captured steps from now on penalise rows `within` of a batch; its others are drawn again."""
        extras, host = self._extras, self._places.host
        table = extras.counts.table
        if table.data_ptr() != self._address:
            self._address = table.data_ptr()
            self.counts.fill_(self._address)
        places = extras.counts.rows[slots]
        wanted = np.where(places >= 0, -2 - places, NONE)
        wanted[within] = places[within]
        values = extras.penalties[slots]
        changed = (host[slots] != wanted) | (
            (wanted != NONE) & (self._values.host[slots] != values).any(axis=1)
        )
        if changed.any():
            self._places.write((slots[changed],), wanted[changed])
            self._values.write((slots[changed],), values[changed])
