# SPDX-License-Identifier: Apache-2.0
"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import NormKind


class Norm(ABC):
    """Normalises the last dimension, then multiplies it by a learned weight.

    With `plus_one`, the factor is 1 + the checkpoint's weight; `weight` holds this factor in float32.
    """

    def __init__(
        self, build: BuildContext, name: str, shape: tuple[int, ...], epsilon: float, *, plus_one: bool
    ) -> None:
        self.name = name
        self.epsilon = epsilon
        self.plus_one = plus_one
        self.fused = build.fused
        dtype = torch.float32 if plus_one else build.dtype
        self.weight = torch.empty(shape, dtype=dtype, device=build.device)

    @property
    def fusible(self) -> bool:
        """Whether kernels may compute it as RMSNorm with `weight`, in the model's dtype."""
        return False

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destination of the weight in the checkpoint."""
        yield from self.targets_of_rows(slice(0, len(self.weight)), len(self.weight))

    def targets_of_rows(self, rows: slice, total: int) -> Iterator[WeightTarget]:
        """Yield the destination of the rows `rows` of a weight whose full shape has `total` rows."""
        rest = self.weight.shape[1:]
        yield WeightTarget(
            name=f"{self.name}.weight",
            shape=(total, *rest),
            shard=(rows, *(slice(0, size) for size in rest)),
            destination=self.weight,
            fill=0.0 if self.plus_one else 1.0,
        )

    def finish(self) -> None:
        """Turn the loaded weight into the factor."""
        if self.plus_one:
            self.weight.add_(1)

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., size], normalised, as a new tensor in the dtype of x."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to `residual` in place and return the normalised sum; all three are [tokens, size]."""
        return self(residual.add_(x))

    def normalise_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the normalised sum of x and `residual`, [tokens, size] each; x may be overwritten."""
        return self(x.add_(residual))

    def normalise_shifted(self, x: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        """Return x [tokens, size] plus `shift` [size], normalised."""
        return self(x if shift is None else x + shift)


class RMSNorm(Norm):
    """Normalises the last dimension to a root mean square of 1, then multiplies it by a learned weight."""

    def __init__(
        self, build: BuildContext, name: str, size: int, epsilon: float, *, plus_one: bool = False
    ) -> None:
        super().__init__(build, name, (size,), epsilon, plus_one=plus_one)

    @property
    def fusible(self) -> bool:
        """Whether kernels may compute it as RMSNorm with `weight`, in the model's dtype."""
        return not self.plus_one

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., size], normalised and multiplied by the weight, in the dtype of x."""
        if self.fused and x.dim() == 2:
            from mizzen.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.epsilon)
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to `residual` in place and return the normalised sum; all three are [tokens, size]."""
        if self.fused:
            from mizzen.kernels.norm import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.epsilon)
        return super().add(x, residual)


class LayerNorm(Norm):
    """Normalises the last dimension to mean 0 and variance 1, then applies a learned weight and bias.

    A weight of several rows [heads, size] belongs to an input [tokens, heads, size].
    """

    def __init__(
        self,
        build: BuildContext,
        name: str,
        shape: tuple[int, ...],
        epsilon: float,
        *,
        bias: bool = False,
        plus_one: bool = False,
    ) -> None:
        super().__init__(build, name, shape, epsilon, plus_one=plus_one)
        self.bias = torch.empty_like(self.weight) if bias else None

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of weight and bias."""
        yield from super().targets()
        if self.bias is not None:
            size = len(self.bias)
            yield WeightTarget(
                name=f"{self.name}.bias",
                shape=(size,),
                shard=(slice(0, size),),
                destination=self.bias,
                fill=0.0,
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., size], normalised, in the dtype of x; sums are in float32."""
        if self.weight.dim() == 1:
            if self.weight.dtype == x.dtype:
                return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
            return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.epsilon).to(
                x.dtype
            )
        normalised = F.layer_norm(x.float(), self.weight.shape[-1:], None, None, self.epsilon)
        return normalised.mul_(self.weight).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to `residual` in place and return the normalised sum; all three are [tokens, size]."""
        if self.fused and self.weight.dim() == 1:
            from mizzen.kernels.norm import add_layer_norm

            return add_layer_norm(x, residual, self.weight, self.bias, self.epsilon)
        return super().add(x, residual)

    def normalise_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the normalised sum of x and `residual`, [tokens, size] each; x may be overwritten."""
        if self.fused and self.weight.dim() == 1:
            from mizzen.kernels.norm import add_layer_norm

            return add_layer_norm(x, residual, self.weight, self.bias, self.epsilon, keeps_sum=False)
        return super().normalise_sum(x, residual)

    def normalise_shifted(self, x: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        """Return x [tokens, size] plus `shift` [size], normalised."""
        if self.fused and self.weight.dim() == 1:
            from mizzen.kernels.norm import shifted_layer_norm

            return shifted_layer_norm(x, shift, self.weight, self.bias, self.epsilon)
        return super().normalise_shifted(x, shift)


def make_norm(
    build: BuildContext, name: str, size: int, epsilon: float, kind: NormKind, *, bias: bool = False
) -> Norm:
    """Make the norm of a kind over the last dimension, of `size` elements."""
    plus_one = kind in (NormKind.RMS_PLUS_ONE, NormKind.LAYER_PLUS_ONE)
    if kind in (NormKind.RMS, NormKind.RMS_PLUS_ONE):
        return RMSNorm(build, name, size, epsilon, plus_one=plus_one)
    return LayerNorm(build, name, (size,), epsilon, bias=bias, plus_one=plus_one)
