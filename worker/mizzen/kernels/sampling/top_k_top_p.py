"""Draws rows that ask for a part of the vocabulary (top k, top p, min p) in one kernel, without sorting.

The tokens are those of `mizzen.engine.sampling.sampler.draw`, its plain twin. Penalties and a grammar's mask are
applied where the row is drawn, so that such rows need no copy of their logits. See filters.cu; NVRTC compiles
it.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from mizzen.kernels.launch import hopper
from mizzen.kernels.nvrtc import load_kernel, launch, can_compile, read_source
from mizzen.kernels.sampling.sample import Processing

SOURCE = read_source("sampling/top_k_top_p")
PARTS = 8
"""Blocks that share a row."""
THREADS = 512
EACH = 4
"""Tokens that a thread has at once, those of a `float4`."""
LARGEST = 400_000
"""Tokens of a vocabulary at most: a block keeps its part's weights in shared memory."""
LOGITS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Parameters(Protocol):
    """How slots draw, each [slots] on the device; see `mizzen.engine.execution.slot_state.SamplingTensors`."""

    @property
    def temperature(self) -> torch.Tensor:
        """float32, above 0."""
        ...

    @property
    def seed(self) -> torch.Tensor:
        """int64."""
        ...

    @property
    def top_k(self) -> torch.Tensor:
        """int64; 0 keeps all."""
        ...

    @property
    def top_p(self) -> torch.Tensor:
        """float32; 1 keeps all."""
        ...

    @property
    def min_p(self) -> torch.Tensor:
        """float32; 0 keeps all."""
        ...


def definitions(vocab: int, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Return what the kernel is compiled with."""
    share = -(-vocab // (PARTS * EACH)) * EACH
    shape = (("LOGITS", LOGITS[dtype]), ("VOCAB", vocab), ("WORDS", -(-vocab // 32)))
    return (*shape, ("PARTS", PARTS), ("SHARE", share), ("THREADS", THREADS), ("EACH", EACH))


def shared_bytes(defines: tuple[tuple[str, int], ...]) -> int:
    """Return the shared memory of a block: its part's weights."""
    return 4 * dict(defines)["SHARE"]


@functools.cache
def serves(vocab: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether the kernel draws from logits [rows, vocab].

    False where device, precision or vocabulary are others, or (with a warning) where kernels cannot be
    compiled.
    """
    if not hopper(device) or dtype not in LOGITS or vocab > LARGEST:
        return False
    defines = definitions(vocab, dtype)
    otherwise = "top k, top p and min p sort the vocabulary"
    return can_compile(SOURCE, "filters", defines, device, otherwise, shared=shared_bytes(defines))


def sample_top_k_top_p(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parameters: Parameters,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor | None = None,
    bits: torch.Tensor | None = None,
    processing: Processing | None = None,
) -> None:
    """Draw some rows of a batch, into `tokens` and, where it is given, `last_tokens`.

    Args:
        logits: [all rows, vocab], contiguous, of a kind that `serves` knows.
        rows: int64 [n], which rows; their temperatures are above 0.
        slots: int32 [all rows].
        positions: int32 [all rows], the sequence positions of the tokens to be drawn.
        parameters: By slot.
        tokens: int64 [all rows].
        last_tokens: int64, by slot.
        bits: int32 [any, ceil(vocab / 32)], contiguous, by slot: bit t % 32 of word t // 32 allows token t.
        processing: Slots whose place is below -1 are penalised before, and what they draw is counted.
    """
    defines = definitions(logits.shape[1], logits.dtype)
    function = load_kernel(SOURCE, "filters", defines, logits.device.index or 0)
    penalties: tuple[torch.Tensor | None, ...] = (None,) * 3
    if processing is not None:
        penalties = (processing.places, processing.values, processing.counts)
    arguments = (
        logits, rows, slots, positions, parameters.temperature, parameters.seed, parameters.top_k,
        parameters.top_p, parameters.min_p, tokens, last_tokens, *penalties, bits,
    )  # fmt: skip
    shared = shared_bytes(defines)
    launch(function, (PARTS, len(rows), 1), THREADS, arguments, cluster=(PARTS, 1, 1), shared=shared)
