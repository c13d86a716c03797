# SPDX-License-Identifier: Apache-2.0
"""Gates of experts, as part of the kernels that multiply by gate and up projections."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from mizzen.models.block import Activation

KINDS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED_SWIGLU: 2}
"""Number of each gate in kernels; experts with other gates use other products."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The function that makes an inner element of an expert from its gate and up projections."""

    kind: Activation
    """A key of `KINDS`."""
    limit: float = 0.0
    """Bound of gate and up, for `CLAMPED_SWIGLU` alone."""
    slope: float = 1.702
    """Factor of the gate in the sigmoid, for `CLAMPED_SWIGLU` alone."""

    @property
    def number(self) -> int:
        """Number of the gate in kernels."""
        return KINDS[self.kind]


@triton.jit
def apply_gate(gate, up, limit, slope, KIND: tl.constexpr):
    """Return activation(gate) * up for float32 values; `KIND` is a value of `KINDS`."""
    exponent = -gate
    if KIND == 1:
        # 0.5 * (1 + tanh(z)) equals the sigmoid of 2 z.
        exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif KIND == 2:
        # Comparisons keep NaN, unlike `tl.minimum`.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1
        exponent = -slope * gate
    return gate / (1 + tl.exp(exponent)) * up
