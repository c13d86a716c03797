"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split layout of checkpoints."""

from __future__ import annotations

import math

import torch

from mizzen.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return, for each pair of elements, the rotation in radians per position: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = dynamic_base(rope, head_dim) if rope.kind == "dynamic" else rope.theta
    inverse = 1.0 / base**exponents
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return llama3_frequencies(rope, inverse)
    if rope.kind == "yarn":
        return yarn_frequencies(rope, inverse)
    return inverse


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


class RotaryEmbedding:
    """Computes the rotation angles of positions, once per step for all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.inverse = inverse_frequencies(rope, head_dim).to(device)
        self.dtype = dtype
        self.attention_factor = rope.attention_factor

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines [tokens, 1, head_dim / 2] for positions [tokens], in `dtype`."""
        angles = positions.float()[:, None, None] * self.inverse
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1:
            cos, sin = cos.mul_(self.attention_factor), sin.mul_(self.attention_factor)
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
