# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers, which depend only on (seed, position), not on the device or the batch.

The sampler uses them; the CUDA and Triton kernels compute the same numbers.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right by `bits` as if it were unsigned (logical shift)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble int64 with the finalizer of SplitMix64 (Steele, Lea, Flood 2014; Stafford's variant 13)."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a random number, float64 in [0, 1 - 2**-52], for each pair of int64 seed and position.

    The seed is scrambled before the position is added, so that neighboring seeds do not share numbers.
    """
    bits = mix(mix(seeds + GOLDEN) + positions * GOLDEN)
    return shift_right(bits, 12).double() * 2.0**-52
