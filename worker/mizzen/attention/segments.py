# SPDX-License-Identifier: Apache-2.0
"""Attention without causal mask of each segment of a sequence to itself, as vision towers need it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from mizzen.attention.base import copy_to_device
from mizzen.attention.flash_attention3 import package_fault
from mizzen.attention.whole_prompts import attend_by_flash3, has_prompt_kernel
from mizzen.kernels.launch import has_wgmma

log = logging.getLogger(__name__)

Segments = tuple[tuple[int, int], ...]
"""Pairs (count, length) of consecutive segments of equal length, which together cover a sequence."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of queries, keys and values [tokens, heads, head_dim], which returns [tokens, heads * head_dim].
The inputs may be strided, but the elements of a head are contiguous."""


class SegmentAttention(Protocol):
    """Attention within segments, for one head dim and dtype."""

    def plan(self, segments: Segments) -> Attend:
        """Return the attention for sequences with these segments, without waiting for the device."""
        ...


class BatchedSegments:
    """Attention by PyTorch: all segments of a pair in `Segments` are one batch."""

    def plan(self, segments: Segments) -> Attend:
        """Return the attention for sequences with these segments."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs, start = [], 0
            for count, length in segments:
                rows = slice(start, start + count * length)
                start = rows.stop
                query, key, value = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
                attended = F.scaled_dot_product_attention(query, key, value)
                outputs.append(attended.transpose(1, 2).reshape(count * length, -1))
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return attend


class FlashSegments:
    """FlashAttention 3 (arXiv 2407.08608): all segments of all lengths in one kernel."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def plan(self, segments: Segments) -> Attend:
        """Return the attention for sequences with these segments, without waiting for the device."""
        counts, lengths = zip(*segments, strict=True)
        ends = np.cumsum(np.repeat(lengths, counts), dtype=np.int32)
        starts = copy_to_device(np.concatenate([np.zeros(1, np.int32), ends]), self.device)
        longest = max(lengths)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend_by_flash3(q, k, v, starts, longest, -1).flatten(1)

        return attend


def make_segment_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> SegmentAttention:
    """Return the fastest attention within segments that a device supports."""
    fits = has_prompt_kernel(device, dtype, head_dim) and head_dim % 8 == 0 and has_wgmma(device)
    if fits and importlib.util.find_spec("sgl_kernel") is not None:
        fault = package_fault()
        if fault is None:
            return FlashSegments(device)
        log.warning("images are encoded with the attention of PyTorch: %s", fault)
    return BatchedSegments()
