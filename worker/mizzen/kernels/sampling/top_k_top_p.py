# SPDX-License-Identifier: Apache-2.0
"""Samples rows with top-k, top-p or min-p in one kernel, without sorting the vocabulary.

The result equals that of the PyTorch code in `mizzen.engine.sampling.sampler`. The kernel also applies
penalties and grammar masks, so no copy of the logits is needed. See top_k_top_p.cu; NVRTC compiles it.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from mizzen.kernels.launch import is_hopper_or_later
from mizzen.kernels.nvrtc import can_compile, launch, load_kernel, read_source
from mizzen.kernels.sampling.sample import LogitsProcessing

SOURCE = read_source("sampling/top_k_top_p")
BLOCKS = 8
"""Number of blocks, all of one cluster, that share a row."""
THREADS = 512
TOKENS_PER_LOAD = 4
"""Number of tokens that a thread loads at once; their weights fill a `float4`."""
MAX_VOCAB = 400_000
"""Largest supported vocabulary in tokens: a block keeps the weights of its tokens in shared memory."""
LOGITS_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class TopKTopPParams(Protocol):
    """Sampling parameters by slot; all tensors are [slots], on the device."""

    @property
    def temperature(self) -> torch.Tensor:
        """Temperatures, float32, above 0."""
        ...

    @property
    def seed(self) -> torch.Tensor:
        """Seeds, int64."""
        ...

    @property
    def top_k(self) -> torch.Tensor:
        """Top-k, int64; 0 keeps all tokens."""
        ...

    @property
    def top_p(self) -> torch.Tensor:
        """Top-p, float32; 1 keeps all tokens."""
        ...

    @property
    def min_p(self) -> torch.Tensor:
        """Min-p, float32; 0 keeps all tokens."""
        ...


def compile_definitions(vocab: int, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions of the kernel for logits [rows, `vocab`] of a dtype."""
    block_tokens = -(-vocab // (BLOCKS * TOKENS_PER_LOAD)) * TOKENS_PER_LOAD
    shape = (("LOGITS", LOGITS_CODES[dtype]), ("VOCAB", vocab), ("WORDS", -(-vocab // 32)))
    return (
        *shape,
        ("BLOCKS", BLOCKS),
        ("BLOCK_TOKENS", block_tokens),
        ("THREADS", THREADS),
        ("TOKENS_PER_LOAD", TOKENS_PER_LOAD),
    )


def shared_bytes(defines: tuple[tuple[str, int], ...]) -> int:
    """Return the dynamic shared memory of a block in bytes; it holds the weights of the block's tokens."""
    return 4 * dict(defines)["BLOCK_TOKENS"]


@functools.cache
def supports(vocab: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel can sample from logits [rows, `vocab`] of a dtype on a device.

    The result is False for GPUs before Hopper, and for unsupported dtypes and vocabularies. It is also False,
    with a warning, if the kernel cannot be compiled.
    """
    if not is_hopper_or_later(device) or dtype not in LOGITS_CODES or vocab > MAX_VOCAB:
        return False
    defines = compile_definitions(vocab, dtype)
    fallback = "top-k, top-p and min-p fall back to sorting the vocabulary"
    return can_compile(SOURCE, "top_k_top_p", defines, device, fallback, shared_bytes=shared_bytes(defines))


def sample_top_k_top_p(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parameters: TopKTopPParams,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor | None = None,
    bits: torch.Tensor | None = None,
    processing: LogitsProcessing | None = None,
) -> None:
    """Sample some rows of a batch, and write the tokens to `tokens` and, if given, to `last_tokens`.

    Args:
        logits: Logits [all rows, vocab], contiguous; their dtype and size must satisfy `supports`.
        rows: Rows to sample, int64 [n]; their temperatures are above 0.
        slots: Slot of each row of the batch, int32 [all rows].
        positions: Sequence position of each sampled token, int32 [all rows].
        parameters: Sampling parameters by slot.
        tokens: Sampled tokens, int64 [all rows]; overwritten for `rows`.
        last_tokens: Last tokens by slot, int64; overwritten for the slots of `rows`.
        bits: Masks by slot, int32 [any, ceil(vocab / 32)], contiguous: bit t % 32 of word t // 32 allows
            token t.
        processing: Penalties to apply, and token counts in which the sampled tokens are counted, for slots
            whose `count_rows` entry is below -1.
    """
    defines = compile_definitions(logits.shape[1], logits.dtype)
    function = load_kernel(SOURCE, "top_k_top_p", defines, logits.device.index or 0)
    penalties: tuple[torch.Tensor | None, ...] = (None,) * 3
    if processing is not None:
        penalties = (processing.count_rows, processing.values, processing.counts)
    arguments = (
        logits, rows, slots, positions, parameters.temperature, parameters.seed, parameters.top_k,
        parameters.top_p, parameters.min_p, tokens, last_tokens, *penalties, bits,
    )  # fmt: skip
    shared_memory = shared_bytes(defines)
    launch(
        function,
        (BLOCKS, len(rows), 1),
        THREADS,
        arguments,
        cluster=(BLOCKS, 1, 1),
        shared_bytes=shared_memory,
    )
