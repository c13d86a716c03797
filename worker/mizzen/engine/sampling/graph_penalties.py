# SPDX-License-Identifier: Apache-2.0
"""Penalties by slot on the device, which sampling kernels in captured graphs read directly.

`Resampler` sets them for each new decode batch.
"""

from __future__ import annotations

import numpy as np
import torch

from mizzen.core.request import Int64
from mizzen.engine.sampling.logits_params import LogitsFeature, LogitsParamsTable
from mizzen.engine.uploader import MirroredArray

NO_ROW = -1
"""Value of `GraphPenalties.count_rows` for slots without penalties."""


class GraphPenalties:
    """Penalties that captured decode steps apply; implements `kernels.sampling.sample.LogitsProcessing`."""

    def __init__(self, params: LogitsParamsTable, slots: int) -> None:
        """Allocate state for `slots` slots, including the scratch slot."""
        self._params = params
        self._count_rows = MirroredArray(np.full(slots, NO_ROW, np.int64), params.upload)
        self._values = MirroredArray(np.zeros((slots, 3), np.float32), params.upload)
        self.counts = torch.zeros(1, dtype=torch.int64, device=params.upload.device)
        self._address = 0

    @property
    def count_rows(self) -> torch.Tensor:
        """Row of each slot in `TokenCounts`, int64 [slots].

        The value is -2 - row if the slot is resampled after the graph, and NO_ROW if it has no penalties.
        """
        return self._count_rows.device

    @property
    def values(self) -> torch.Tensor:
        """Frequency, presence and repetition penalty of each slot, float32 [slots, 3]."""
        return self._values.device

    def rows_in_graph(self, slots: Int64, excluded: Int64) -> Int64:
        """Return the batch rows that need no processing except penalties, which a sampling kernel can apply.

        Args:
            slots: Slot of each batch row, int64 [rows].
            excluded: Batch rows to leave out, because no kernel samples them, int64 [n].
        """
        only_penalties = (
            self._params.features[slots] & ~np.uint8(LogitsFeature.LOGPROBS) == LogitsFeature.PENALTIES
        )
        only_penalties[excluded] = False
        return np.flatnonzero(only_penalties)

    def set_batch(self, slots: Int64, graph_rows: Int64) -> None:
        """Set the rows to which captured steps apply penalties, for a new batch.

        Args:
            slots: Slot of each batch row, int64 [rows].
            graph_rows: Batch rows whose penalties the graph applies. All other rows with penalties are
                resampled after the graph.
        """
        params, host = self._params, self._count_rows.host
        table = params.counts.table
        if table.data_ptr() != self._address:
            self._address = table.data_ptr()
            self.counts.fill_(self._address)
        count_rows = params.counts.row_by_slot[slots]
        signed_rows = np.where(count_rows >= 0, -2 - count_rows, NO_ROW)
        signed_rows[graph_rows] = count_rows[graph_rows]
        values = params.penalties[slots]
        changed = (host[slots] != signed_rows) | (
            (signed_rows != NO_ROW) & (self._values.host[slots] != values).any(axis=1)
        )
        if changed.any():
            self._count_rows.write((slots[changed],), signed_rows[changed])
            self._values.write((slots[changed],), values[changed])
