"""Per-slot penalty parameters on the device, read directly by captured graphs (no per-batch gather).

`Resampler` sets them for each new decode batch; the sampling kernels read them.
"""

from __future__ import annotations

import numpy as np
import torch

from mizzen.core.request import Int64
from mizzen.engine.sampling.logits_params import LogitsFeature, LogitsParamsTable
from mizzen.engine.uploader import MirroredArray

NO_ROW = -1


class GraphPenalties:
    """Which slots captured steps penalize, and how; see `mizzen.kernels.sampling.sample.LogitsProcessing`."""

    def __init__(self, params: LogitsParamsTable, slots: int) -> None:
        """Allocate state for `slots` slots, including the scratch slot."""
        self._params = params
        self._places = MirroredArray(np.full(slots, NO_ROW, np.int64), params.upload)
        self._values = MirroredArray(np.zeros((slots, 3), np.float32), params.upload)
        self.counts = torch.zeros(1, dtype=torch.int64, device=params.upload.device)
        self._address = 0

    @property
    def count_rows(self) -> torch.Tensor:
        """Row of each slot in `TokenCounts`, int64 [slots].

        -2 - row if the slot is resampled, NO_ROW if it is not penalized.
        """
        return self._places.device

    @property
    def values(self) -> torch.Tensor:
        """Frequency, presence and repetition penalties, float32 [slots, 3]."""
        return self._values.device

    def rows_in_graph(self, slots: Int64, apart: Int64) -> Int64:
        """Return the batch rows whose only processing is penalties, which the sampling kernel applies itself.

        `apart` are rows that no kernel samples.
        """
        only_penalties = (
            self._params.features[slots] & ~np.uint8(LogitsFeature.LOGPROBS) == LogitsFeature.PENALTIES
        )
        only_penalties[apart] = False
        return np.flatnonzero(only_penalties)

    def set_batch(self, slots: Int64, graph_rows: Int64) -> None:
        """Make captured steps penalize rows `graph_rows` of a batch; other penalized rows are resampled."""
        params, host = self._params, self._places.host
        table = params.counts.table
        if table.data_ptr() != self._address:
            self._address = table.data_ptr()
            self.counts.fill_(self._address)
        count_rows = params.counts.row_by_slot[slots]
        places = np.where(count_rows >= 0, -2 - count_rows, NO_ROW)
        places[graph_rows] = count_rows[graph_rows]
        values = params.penalties[slots]
        changed = (host[slots] != places) | (
            (places != NO_ROW) & (self._values.host[slots] != values).any(axis=1)
        )
        if changed.any():
            self._places.write((slots[changed],), places[changed])
            self._values.write((slots[changed],), values[changed])
