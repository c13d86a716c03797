# SPDX-License-Identifier: Apache-2.0
"""From pooled hidden states to embeddings and logits, in batches of equal kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from mizzen.core.step_plan import SlotOptions
from mizzen.engine.sampling.side_outputs import PooledVectors
from mizzen.engine.uploader import Uploader


def compute_vectors(
    pooled: torch.Tensor,
    slots: Sequence[int],
    options: Sequence[SlotOptions],
    finish: Callable[[torch.Tensor, bool], torch.Tensor],
    upload: Uploader,
) -> tuple[PooledVectors, ...]:
    """Return the embeddings of prompts, scaled to length 1 where their options say so, and the logits.

    Args:
        pooled: Pooled hidden states, float32 [prompts, hidden].
        slots: Slot of each prompt.
        options: Options of each prompt.
        finish: Maps pooled hidden states to logits if its second argument is True, else to embeddings.
        upload: Copies arrays to the device.
    """
    kinds = [(each.classify, each.normalize and not each.classify) for each in options]
    results: list[PooledVectors] = []
    for kind in sorted(set(kinds)):
        rows = [row for row, each in enumerate(kinds) if each == kind]
        classify, normalize = kind
        values = finish(pooled if len(rows) == len(kinds) else pooled[upload(np.array(rows))], classify)
        values = F.normalize(values, dim=1) if normalize else values
        results.append(PooledVectors(tuple(slots[row] for row in rows), values))
    return tuple(results)
