# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention within each prompt of a batch without padding, for encoders.

Nothing is cached: all keys and values of a prompt are in the batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from mizzen.attention import flash_attention3
from mizzen.core.request import Int64
from mizzen.kernels.launch import has_wgmma

if TYPE_CHECKING:
    from mizzen.kernels.attention.whole_prompts import PromptTiles

QUERY_BLOCK = 128
"""Number of queries that are computed together in a layer with a window; they read only the keys in reach."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes for which there are FlashAttention kernels for prompts of unequal lengths on GPUs."""
MAX_FLASH_HEAD_DIM = 256
TILED_HEAD_DIMS = (32, 64)
"""Head sizes for which Mizzen's own kernel is faster than FlashAttention 3 for short prompts (on an H100)."""
MAX_TILED_TOKENS = 2048
"""Longest prompts for which it is not slower; with a window it is always faster."""

PromptKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]
"""Function (q, k, v, begins, longest, reach) that computes attention within prompts of unequal lengths.

q, k and v are [tokens, heads, d], as is the result; begins (int32 [prompts + 1]) has the begin of each prompt
and the end of the last one. No prompt has more than `longest` tokens. A token attends to `reach` tokens to
each side of itself, or to its whole prompt if `reach` is -1. Kernels may be captured in a graph.
"""


def has_prompt_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether there is a `PromptKernel` for a device and model."""
    return device.type == "cuda" and dtype in FLASH_DTYPES and head_dim <= MAX_FLASH_HEAD_DIM


@lru_cache(maxsize=16)
def runs_flash_attention3(device: torch.device, head_dim: int) -> bool:
    """Return whether `select_prompt_kernel` selects FlashAttention 3, which Hopper GPUs have."""
    return has_wgmma(device) and head_dim % 8 == 0 and flash_attention3.package_fault() is None


def select_prompt_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> PromptKernel | None:
    """Return the fastest `PromptKernel` for a device and model; None without any."""
    if not has_prompt_kernel(device, dtype, head_dim):
        return None
    return attend_by_flash3 if runs_flash_attention3(device, head_dim) else attend_by_flash2


def attend_by_flash2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begins: torch.Tensor, longest: int, reach: int
) -> torch.Tensor:
    """Compute attention within prompts by PyTorch's FlashAttention 2 (arXiv 2307.08691)."""
    # Imported only here: the module imports TorchDynamo, which takes as long as all other imports together.
    kernels: Any = importlib.import_module("torch.nn.attention.varlen")
    out = kernels.varlen_attn(q, k, v, begins, begins, longest, longest, window_size=(reach, reach))
    return out if isinstance(out, torch.Tensor) else out[0]


def attend_by_flash3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begins: torch.Tensor, longest: int, reach: int
) -> torch.Tensor:
    """Compute attention within prompts by FlashAttention 3 (arXiv 2407.08608)."""
    kernels: Any = importlib.import_module(flash_attention3.PACKAGE)
    return kernels.flash_attn_varlen_func(
        q, k, v, begins, begins, longest, longest, window_size=(reach, reach)
    )


class PromptAttention:
    """Attention of one batch of prompts; the arguments of a call are those of `encoders.layer.Attend`."""

    def __init__(self, lengths: Int64, device: torch.device) -> None:
        """Plan a batch.

        Args:
            lengths: Number of tokens of each prompt, int64 [prompts], each at least 1.
            device: Device of the model.
        """
        self.ends = np.cumsum(lengths).tolist()
        self.longest = int(lengths.max())
        self.masks: dict[tuple[int, int, int, int], torch.Tensor] = {}
        """Masks of blocks of queries, by the arguments of `block_mask`."""
        self.device = device
        self.tiles: PromptTiles | None = None
        """Tiles of the batch for Mizzen's own kernel, once a layer has planned them."""
        self.offsets: torch.Tensor | None = None
        if device.type == "cuda":
            offsets = torch.tensor([0, *self.ends], dtype=torch.int32, pin_memory=True)
            self.offsets = offsets.to(device, non_blocking=True)

    @classmethod
    def from_device(cls, begins: torch.Tensor, longest: int) -> PromptAttention:
        """Plan a batch on a GPU from the begins of prompts on the device, for calls of the kernel alone.

        Args:
            begins: Begin of each prompt and the end of the last one, int32 [prompts + 1]; prompts may be
                empty.
            longest: Upper bound of the lengths of prompts.
        """
        attention = cls(np.array([longest], np.int64), torch.device("cpu"))
        attention.device, attention.offsets = begins.device, begins
        return attention

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return the attention of q, k and v [tokens, heads, d] within each prompt, [tokens, heads * d].

        A token attends to `window` tokens to each side of itself, or to its whole prompt if `window` is None.
        """
        if window is not None and window >= self.longest - 1:
            window = None
        reach = -1 if window is None else window
        if self.offsets is not None and self.runs_tiles(q, reach):
            return self.attend_by_tiles(q, k, v, self.offsets, reach).flatten(1)
        kernel = select_prompt_kernel(self.device, q.dtype, q.shape[-1])
        if kernel is not None and self.offsets is not None:
            return kernel(q, k, v, self.offsets, self.longest, reach).flatten(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        begin = 0
        for end in self.ends:
            prompt = slice(begin, end)
            self.attend_prompt(q[prompt], k[prompt], v[prompt], window, out[prompt])
            begin = end
        return out.flatten(1)

    def runs_tiles(self, q: torch.Tensor, reach: int) -> bool:
        """Return whether Mizzen's own kernel is the fastest for queries [tokens, heads, d]."""
        short = self.longest <= MAX_TILED_TOKENS or reach >= 0
        return short and q.dtype in FLASH_DTYPES and q.shape[-1] in TILED_HEAD_DIMS and has_wgmma(self.device)

    def attend_by_tiles(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begins: torch.Tensor, reach: int
    ) -> torch.Tensor:
        """Compute attention by Mizzen's own kernel; for the arguments see `PromptKernel`."""
        from mizzen.kernels.attention.whole_prompts import attend_tiles, plan_tiles

        if self.tiles is None:
            self.tiles = plan_tiles(begins, len(q), self.longest)
        return attend_tiles(q, k, v, self.tiles, reach)

    def attend_prompt(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, out: torch.Tensor
    ) -> None:
        """Compute the attention of one prompt; all tensors are [tokens of the prompt, heads, d]."""
        length = len(q)
        if window is None or window >= length - 1:
            out.copy_(attend(q, k, v, None))
            return
        for begin in range(0, length, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, length)
            first, last = max(0, begin - window), min(length, end + window)
            mask = self.block_mask(end - begin, last - first, begin - first, window)
            out[begin:end] = attend(q[begin:end], k[first:last], v[first:last], mask)

    def block_mask(self, queries: int, keys: int, offset: int, window: int) -> torch.Tensor:
        """Return which keys a block of queries attends to, bool [queries, keys].

        The first query is at the place of key `offset`.
        """
        arguments = (queries, keys, offset, window)
        mask = self.masks.get(arguments)
        if mask is None:
            distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - offset
            mask = self.masks[arguments] = (distance.abs() <= window).to(self.device)
        return mask


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the attention [queries, heads, d] of q [queries, heads, d] to k and v [keys, heads, d]."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
