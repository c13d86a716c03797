# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split layout of checkpoints."""

from __future__ import annotations

import math

import torch

from mizzen.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return, for each pair of elements, the rotation in radians per position: float32 [head_dim / 2].

    Pairs beyond the rotary part of the head are not rotated: their frequency is 0.
    """
    if rope.kind == "none":
        return torch.zeros(head_dim // 2)
    size = rope.rotary_dim or head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    base = dynamic_base(rope, size) if rope.kind == "dynamic" else rope.theta
    inverse = extend(rope, 1.0 / base**exponents)
    return torch.cat((inverse, torch.zeros((head_dim - size) // 2)))


def extend(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Change the frequencies (float32 [rotary_dim / 2]) of the pre-trained model for longer contexts."""
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return llama3_frequencies(rope, inverse)
    if rope.kind == "yarn":
        return yarn_frequencies(rope, inverse)
    if rope.kind == "longrope":
        return inverse / torch.tensor(rope.divisors, dtype=torch.float32)
    return inverse


def half_split_order(rope: RopeConfig, head_dim: int) -> torch.Tensor | None:
    """Return the order of a head's elements in which element i is rotated with element i + head_dim / 2.

    Element i of the reordered head is element order[i] (int64 [head_dim]) of the checkpoint's head. The order
    is the same for queries and keys, so their products do not change. None if it is the checkpoint's order.
    """
    size = head_dim if rope.kind == "none" else rope.rotary_dim or head_dim
    if size == head_dim and not rope.interleaved:
        return None
    elements = torch.arange(head_dim)
    rotated = elements[:size].view(-1, 2).t() if rope.interleaved else elements[:size].view(2, -1)
    return torch.cat((rotated, elements[size:].view(2, -1)), dim=1).flatten()


def dynamic_base(rope: RopeConfig, head_dim: int) -> float:
    """Return the base, raised so that rotations are slow enough for the served context ("NTK-aware")."""
    length = max(rope.served_context, rope.original_context)
    stretch = rope.factor * length / rope.original_context - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def yarn_frequencies(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Interpolate low frequencies, which make few rotations in the original context; keep high ones (YaRN).

    `inverse` and the result are float32 [head_dim / 2]; see arXiv 2309.00071.
    """
    half = len(inverse)

    def dimension(rotations: float) -> float:
        fraction = math.log(rope.original_context / (rotations * 2 * math.pi)) / math.log(rope.theta)
        return fraction * half

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / rope.factor * stretched + inverse * (1 - stretched)


def llama3_frequencies(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Divide frequencies of long wavelengths by `factor`, and keep those of short wavelengths (Llama 3.1).

    For wavelengths in between, the divided and the original frequency are blended. `inverse` and the result
    are float32 [head_dim / 2].
    """
    wavelength = 2 * math.pi / inverse
    longest = rope.original_context / rope.low_frequency_factor
    shortest = rope.original_context / rope.high_frequency_factor
    blend = (rope.original_context / wavelength - rope.low_frequency_factor) / (
        rope.high_frequency_factor - rope.low_frequency_factor
    )
    mixed = (1 - blend) * inverse / rope.factor + blend * inverse
    stretched = torch.where(wavelength > longest, inverse / rope.factor, inverse)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), mixed, stretched)


def select_axes(rope: RopeConfig, head_dim: int) -> torch.Tensor | None:
    """Return the position that rotates each pair of elements: 0 (time), 1 (height) or 2 (width).

    This is the multimodal embedding (M-RoPE) of Qwen2-VL (arXiv 2409.12191), in which `rope.sections` gives
    the numbers of pairs for time, height and width. Pairs of a position are consecutive, or with
    `sections_interleaved` (Qwen3-VL) every third pair belongs to height and every third to width, until their
    numbers are reached.

    Returns:
        int64 [head_dim / 2]; None for embeddings with one position for each token.
    """
    if not rope.has_sections:
        return None
    axes = torch.zeros(head_dim // 2, dtype=torch.int64)
    time, height, width = rope.sections
    if rope.sections_interleaved:
        axes[1 : 3 * height : 3] = 1
        axes[2 : 3 * width : 3] = 2
    else:
        axes[time : time + height] = 1
        axes[time + height : time + height + width] = 2
    return axes


class RotaryEmbedding:
    """Computes the rotation angles of positions, once per step for all layers with the same embedding."""

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.inverse = inverse_frequencies(rope, head_dim).to(device)
        self.dtype = dtype
        self.factors: torch.Tensor | None = None
        """Factors of cosines and sines, float32 [head_dim / 2]; None if all are 1."""
        if rope.served_attention_factor != 1 and rope.kind != "none":
            self.factors = torch.ones_like(self.inverse)
            self.factors[: (rope.rotary_dim or head_dim) // 2] = rope.served_attention_factor
        axes = select_axes(rope, head_dim)
        self.axes = None if axes is None else axes.to(device)
        """The position that rotates each pair, int64 [head_dim / 2]; None without three positions."""

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines [tokens, 1, head_dim / 2] for positions, in `dtype`.

        `positions` are integers [tokens], or [3, tokens] for embeddings with three positions for each token.
        """
        if positions.ndim == 2 and self.axes is not None:
            angles = positions.t().float().index_select(1, self.axes).mul_(self.inverse)[:, None]
        else:
            angles = positions.float()[:, None, None] * self.inverse
        cos, sin = angles.cos(), angles.sin()
        if self.factors is not None:
            cos, sin = cos.mul_(self.factors), sin.mul_(self.factors)
        return cos.to(self.dtype), sin.to(self.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [tokens, heads, head_dim] by angles [tokens, 1, head_dim / 2]; return a new tensor."""
    left, right = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_left, out_right = out.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left)
    out_left.addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out_right)
    out_right.addcmul_(left, sin)
    return out
