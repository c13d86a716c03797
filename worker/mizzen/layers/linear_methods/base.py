# SPDX-License-Identifier: Apache-2.0
"""Interface of linear methods: one class for each format in which weights of a linear layer are stored.

`BuildContext.make_linear` makes a linear method for each linear layer. Quantization formats belong here: a
method decides which tensors it loads and how it multiplies.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from mizzen.layers.staging import Staging
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import Activation

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec


class GateActivation(Protocol):
    """Activation function of the gate in a feed-forward block."""

    kind: Activation

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return activation(gate) * up, [tokens, size], for gate and up together, [tokens, 2 * size]."""
        ...


class ElementwiseActivation(Protocol):
    """Activation function of a feed-forward block without a gate."""

    kind: Activation
    fused: bool
    """Whether kernels may replace PyTorch's operations."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the function of x as a new tensor."""
        ...


class MeasuredWeights(Protocol):
    """Weights that report their size by format."""

    def format_bytes(self) -> Mapping[str, int]:
        """Return the bytes of loaded quantized weights by their format; see `LinearMethod`."""
        ...


class InputNorm(Protocol):
    """Norm between the residual stream and a linear layer."""

    weight: torch.Tensor
    epsilon: float

    @property
    def fusible(self) -> bool:
        """Whether kernels may compute it as RMSNorm with `weight`, in the model's dtype."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., size], normalised, as a new tensor in the dtype of x."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to `residual` in place and return the normalised sum; all three are [tokens, size]."""
        ...


class LinearKind(enum.StrEnum):
    """Role of a linear layer in a model, on which the choice of kernels may depend."""

    COLUMN = "column"
    """Sharded by output rows; its input comes from a norm."""
    ROW = "row"
    """Sharded by input columns; its output is summed over ranks and added to the residual stream."""
    HEAD = "head"
    """Output head, sharded by output rows, that is, by the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPart:
    """This rank's shard of one linear layer of the checkpoint, and its place in a merged layer."""

    name: str
    """Name of the layer in the checkpoint, without `.weight`."""
    first_row: int
    """Output row of the merged layer at which the shard starts."""
    rows: slice
    """Output rows of the checkpoint layer that this rank holds."""
    columns: slice
    """Input columns of the checkpoint layer that this rank holds."""
    shape: tuple[int, int]
    """Full shape [rows, columns] of the checkpoint layer."""

    @property
    def merged_rows(self) -> slice:
        """Output rows of the merged layer that the shard fills."""
        return slice(self.first_row, self.first_row + self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """One linear layer on one rank: everything by which a factory chooses and makes a linear method."""

    parts: tuple[LinearPart, ...]
    rows: int
    """Output rows on this rank; at least those of all parts, and more in a padded head."""
    columns: int
    """Input columns on this rank."""
    bias: bool
    kind: LinearKind
    swiglu: bool = False
    """Whether the outputs are those of a SwiGLU block: gate rows followed by as many up rows."""
    dtype: torch.dtype
    device: torch.device
    online: bool = False
    """Whether the checkpoint stores an unquantized weight, which is quantized while it is loaded."""


class LinearMethod(ABC):
    """Weights of one linear layer, and the multiplication by them.

    A method must have `targets` and `apply`; the others may be overridden where a format has a faster way.
    Whatever their format, the weights keep their addresses once loaded, so that captured graphs stay valid.
    """

    bias: torch.Tensor | None = None
    """Bias [rows], if the method keeps one."""

    @abstractmethod
    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""

    @abstractmethod
    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [tokens, columns]; return [tokens, rows], in `out` (rows may be strided) if given."""

    @abstractmethod
    def permute_rows(self, order: torch.Tensor) -> None:
        """Replace output row i by row order[i] (int64 [rows]), after loading and before `finish`."""

    @abstractmethod
    def scale_rows(self, rows: slice, factor: float, *, bias: bool = True) -> None:
        """Multiply the weights of output rows, and with `bias` their biases too, by a power of two.

        It may be called after `finish`, but not after a graph was captured.
        """

    def absorb_input_factor(self, factor: float) -> None:
        """Multiply the weights, but not the biases, by a power of two by which all later inputs are divided.

        It may be called when `scale_rows` may be. Methods that quantize inputs by stored scales must divide
        these scales, too.
        """
        self.scale_rows(slice(None), factor, bias=False)

    def finish(self) -> None:  # noqa: B027 (optional)
        """Prepare the loaded weights for the kernels, before any graph is captured."""

    def apply_glu(self, x: torch.Tensor, activation: GateActivation) -> torch.Tensor:
        """Multiply x [tokens, columns] by gate and up; return activation(gate) * up, [tokens, rows / 2].

        The weight holds the gate rows followed by the up rows.
        """
        return activation.gate(self.apply(x))

    def apply_activation(self, x: torch.Tensor, activation: ElementwiseActivation) -> torch.Tensor:
        """Multiply x [tokens, columns]; return the activation function of the outputs [tokens, rows]."""
        return activation(self.apply(x))

    def apply_after_norm(
        self,
        norm: InputNorm,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        activation: GateActivation | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Add x to the residual stream, normalise the sum and multiply by the weights, all in one kernel.

        Args:
            norm: Norm between the residual stream and the multiplication.
            x: Tensor [tokens, columns] to add to the residual stream; None to add nothing.
            residual: Residual stream [tokens, columns].
            activation: Activation of the gate if the outputs are gate and up; None if they are not.

        Returns:
            The outputs [tokens, rows], or activation(gate) * up [tokens, rows / 2], and the residual stream
            with x added. If no fused kernel is faster than separate kernels, nothing is done, and the result
            is None.
        """
        return None

    def add_to_residual(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        """Multiply x [tokens, columns], and add the product without `bias` to `residual` [tokens, rows].

        Returns:
            True if this was done. False if the method has no GEMM that adds, and has done nothing.
        """
        return False

    def format_bytes(self) -> Mapping[str, int]:
        """Return the bytes of loaded quantized weights with their scales and zero points, by their format.

        Weights that `targets` still yields after loading are not among them.
        """
        return {}

    def set_consumer(self, consumer: LinearMethod) -> None:  # noqa: B027 (optional)
        """Name the method that multiplies the results of `apply_glu`, and is passed them unchanged.

        The results may then have the format in which that method quantizes its inputs.
        """

    def set_next(self, method: LinearMethod) -> None:  # noqa: B027 (optional)
        """Name the method that multiplies next, not necessarily the results of this one.

        Kernels may load its weight into the cache of the GPU, but use nothing of it.
        """

    def kernel_specs(
        self, batch_sizes: Iterable[int], *, activation: GateActivation | None = None
    ) -> set[KernelSpec]:
        """Return the specs of kernels to compile at start-up for these batch sizes.

        `activation` is given for a layer whose outputs are gate and up.
        """
        return set()

    def set_prefill_fusion(self, enabled: bool) -> None:  # noqa: B027 (optional)
        """Allow or forbid kernels that save memory of prefills, in layers whose outputs are gate and up."""


def list_weight_targets(
    parts: Iterable[LinearPart], weight: torch.Tensor, staging: Staging | None = None
) -> Iterator[WeightTarget]:
    """Yield the destinations of the unquantized weights of all parts.

    Args:
        parts: Layers of the checkpoint, and their places in the merged layer.
        weight: The merged weight [rows, columns], or the `shape` of `staging`.
        staging: Temporary buffer that is filled instead of a parameter.
    """
    for part in parts:
        yield WeightTarget(
            name=f"{part.name}.weight",
            shape=part.shape,
            shard=(part.rows, part.columns),
            destination=weight[part.merged_rows],
            staging=staging,
        )


def list_bias_targets(spec: LinearSpec, bias: torch.Tensor | None) -> Iterator[WeightTarget]:
    """Yield the destinations of the biases of all parts in `bias` [rows]; nothing without a bias."""
    if bias is None:
        return
    for part in spec.parts:
        yield WeightTarget(
            name=f"{part.name}.bias",
            shape=part.shape[:1],
            shard=(part.rows,),
            destination=bias[part.merged_rows],
        )


LinearFactory = Callable[[LinearSpec], LinearMethod]
"""Function that makes the linear method of one layer."""


@contextmanager
def without_prefill_fusion(methods: Sequence[LinearMethod]) -> Iterator[None]:
    """Forbid the kernels of `LinearMethod.set_prefill_fusion` in a `with` block."""
    for method in methods:
        method.set_prefill_fusion(False)
    try:
        yield
    finally:
        for method in methods:
            method.set_prefill_fusion(True)
