# SPDX-License-Identifier: Apache-2.0
"""Weights and inputs in 8 bits (FP8 E4M3 or INT8), multiplied by the tensor cores in 8 bits.

The weight stays row-major, as loaded, in one copy. Small batches use `mizzen.kernels.gemm.w8a8_swap_ab`, and
larger ones GEMMs of libraries on the same weight (cuBLAS through PyTorch, and sgl_kernel), which compute
faster, but load the weights of small batches more slowly. Inputs are quantized as the checkpoint asks for, in
the kernel of the norm before the layer or in a separate kernel. A scale of all tokens of a batch is replaced
by a scale for each token, which is at least as exact and does not depend on the other requests of the batch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from mizzen.layers.linear_methods.base import (
    GateActivation,
    InputNorm,
    LinearKind,
    LinearMethod,
    LinearSpec,
)
from mizzen.layers.linear_methods.dequantized import DequantizedLinear, repeat_row_scales
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight
from mizzen.models.block import Activation
from mizzen.quantization.schemes import (
    Activations,
    ActivationScales,
    Fp8Weights,
    Int8Weights,
    ScaleShape,
    WeightScheme,
)

if TYPE_CHECKING:
    from mizzen.kernels.gemm.w8a8_swap_ab import QuantizedInputs, W8A8Weight
    from mizzen.kernels.nvrtc import KernelSpec
    from mizzen.kernels.quantization.inputs import InputFormat

GROUP_COLUMNS = 128
"""Columns that share a scale, in inputs and weights, if not all columns do."""
LIBRARY_MULTIPLE = 16
"""The library's GEMMs need numbers of rows and columns that are multiples of this."""
MAX_BATCH = 96
"""Largest batch for which the small-batch kernel was measured to be no slower than a library GEMM (H200)."""
MAX_SWIGLU_BATCH = 192
"""As `MAX_BATCH`, with fused SwiGLU, compared with a library GEMM and a SwiGLU kernel (H100)."""
MAX_INT8_SWIGLU_BATCH = 256
"""As `MAX_SWIGLU_BATCH`, for INT8."""
MAX_GROUPED_BATCH = 128
"""As `MAX_BATCH`, for scales of blocks."""
MAX_SWIGLU_GROUPED_BATCH = 96
"""As `MAX_SWIGLU_BATCH`, for scales of blocks."""
MAX_SGL_BATCH, MAX_SGL_ROWS = 256, 4096
"""Largest batch, and largest number of rows of the weight, for which sgl_kernel's FP8 GEMM with scales of
channels was measured to be faster than cuBLAS (H100)."""
CUBLAS_GROUPS = 4
"""cuBLAS supports weights with scales of blocks if the groups of columns are a multiple of this number."""
CUBLAS_BLOCKS_VERSION = (12, 9)
"""First version of CUDA whose cuBLAS supports scales of blocks."""
MAX_EARLY_BATCH = 8
"""Largest batch of a column-parallel layer during whose product the next kernel may start.

Attention of so few tokens has at most one block per SM, so that its blocks cannot crowd on some of them. In
whole layers of Qwen3-8B on an H100, starting early saved 3 and 4 us a layer for 1 and 8 tokens; for 32 tokens
it cost 9 us.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """A weight prepared for the kernels, and the format of its inputs."""

    weight: W8A8Weight
    inputs: InputFormat
    library_bias: torch.Tensor | None
    """The bias in bfloat16."""
    uses_library: bool
    """Whether a library GEMM supports the weight."""


def is_w8a8(spec: LinearSpec, scheme: WeightScheme) -> bool:
    """Return whether a layer has weights and inputs in 8 bits that `W8A8Linear` supports.

    Inputs with a zero point are left to the methods that do not quantize inputs.
    """
    if not isinstance(scheme, Fp8Weights | Int8Weights) or scheme.activations is None:
        return False
    activations, columns = scheme.activations, spec.columns
    if not activations.symmetric or columns % 16 or spec.rows % (16 if spec.swiglu else 8):
        return False
    match scheme.scale_shape:
        case ScaleShape.TENSOR | ScaleShape.CHANNEL:
            return activations.scales is not ActivationScales.TOKEN_GROUP
        case ScaleShape.BLOCK:
            block = scheme.block if isinstance(scheme, Fp8Weights) else None
            grouped = activations.scales is ActivationScales.TOKEN_GROUP
            sizes = (block[1], activations.group_size) if block else ()
            return grouped and sizes == (GROUP_COLUMNS, GROUP_COLUMNS) and has_whole_blocks(spec)
        case _:
            return False


def has_whole_blocks(spec: LinearSpec) -> bool:
    """Return whether all parts of a layer have whole blocks, as the library's GEMM for large batches needs.

    If a rank's rows or columns begin within a block, fewer of them share a scale.
    """
    bounds = [
        bound
        for part in spec.parts
        for bound in (part.first_row, part.rows.start, part.rows.stop, part.columns.start, part.columns.stop)
    ]
    return not any(bound % GROUP_COLUMNS for bound in (*bounds, spec.rows))


class W8A8Linear(DequantizedLinear):
    """Weights and inputs in 8 bits, on a Hopper GPU; `is_w8a8` says which layers it supports."""

    def __init__(self, spec: LinearSpec, scheme: WeightScheme) -> None:
        super().__init__(spec, scheme)
        self.defer_pdl = spec.kind is LinearKind.COLUMN
        """Whether the kernel after a large product must not start early; see `MAX_EARLY_BATCH`."""
        self.operands: Operands | None = None
        self.consumer: W8A8Linear | None = None
        self.prepared_inputs: QuantizedInputs | None = None
        """Inputs that the method before this one quantized; `apply` is then passed their values."""

    def set_consumer(self, consumer: LinearMethod) -> None:
        """Name the method that multiplies the results of `apply_glu`, and is passed them unchanged."""
        self.consumer = consumer if isinstance(consumer, W8A8Linear) else None

    def finish(self) -> None:
        """Convert the stored tensors, and prepare them for the kernels.

        Raises:
            WeightsError: A tensor has invalid values.
        """
        super().finish()
        self._prepare()

    def scale_rows(self, rows: slice, factor: float, *, bias: bool = True) -> None:
        """Multiply the scales of output rows, and with `bias` their biases too, by a power of two."""
        super().scale_rows(rows, factor, bias=bias)
        if self.operands is not None:
            self._prepare()

    def absorb_input_factor(self, factor: float) -> None:
        """Multiply the weights by a power of two by which all later inputs are divided.

        The static scale of the inputs, or their upper bound, is divided by it, so that the codes stay the
        same.
        """
        weight = self.weight
        weight.input_scale /= factor
        if weight.activations is not None and weight.activations.upper_bound is not None:
            bound = weight.activations.upper_bound / factor
            weight.activations = replace(weight.activations, upper_bound=bound)
        super().absorb_input_factor(factor)

    def _prepare(self) -> None:
        from mizzen.kernels.gemm.w8a8_swap_ab import W8A8Weight, supports

        weight = self.weight
        if weight.scales.shape[1] == 1:
            repeat_row_scales(weight, 1)
        weight.scales = weight.scales.float().contiguous()
        grouped = weight.scales.shape[1] > 1
        if not supports(weight.values, grouped=grouped, swiglu=self.spec.swiglu):
            return
        self.operands = Operands(
            weight=W8A8Weight(
                values=weight.values,
                scales=weight.scales,
                row_step=weight.row_step,
                bias=None if self.bias is None else self.bias.float(),
            ),
            inputs=make_input_format(weight),
            library_bias=self.bias,
            uses_library=library_supports(weight),
        )

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [tokens, columns]; return [tokens, rows], in `out` if given."""
        operands = self.operands
        if operands is None:
            return super().apply(x, out)
        if not self._has_product(operands, len(x), swiglu=False):
            return super().apply(x, out)
        from mizzen.kernels.quantization.inputs import quantize_inputs

        prepared, self.prepared_inputs = self.prepared_inputs, None
        if prepared is None or prepared.values is not x:
            prepared = quantize_inputs(x, operands.inputs)
        return self._multiply(operands, prepared, out)

    def apply_glu(self, x: torch.Tensor, activation: GateActivation) -> torch.Tensor:
        """Multiply x [tokens, columns] by gate and up; return activation(gate) * up, [tokens, rows / 2]."""
        operands = self.operands
        if operands is None or not self._has_product(operands, len(x), swiglu=True):
            return super().apply_glu(x, activation)
        from mizzen.kernels.quantization.inputs import quantize_inputs

        return self._multiply_glu(operands, quantize_inputs(x, operands.inputs), activation)

    def apply_after_norm(
        self,
        norm: InputNorm,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        activation: GateActivation | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Add x to the residual stream, normalise and quantize the sum in one kernel, and multiply it.

        The residual stream is updated in place; see `LinearMethod.apply_after_norm`.
        """
        operands = self.operands
        if operands is None or not norm.fusible:
            return None
        if not self._has_product(operands, len(residual), swiglu=activation is not None):
            return None
        from mizzen.kernels.quantization.inputs import quantize_after_norm

        first, added = (residual, None) if x is None else (x, residual)
        inputs = quantize_after_norm(first, added, norm.weight, norm.epsilon, operands.inputs)
        if activation is None:
            return self._multiply(operands, inputs), residual
        return self._multiply_glu(operands, inputs, activation), residual

    def kernel_specs(
        self, batch_sizes: Iterable[int], *, activation: GateActivation | None = None
    ) -> set[KernelSpec]:
        """Return the specs of the small-batch kernels for all batch sizes.

        Eager steps may have sizes between or beyond those of graphs, which `batch_sizes` lists.
        """
        if self.operands is None:
            return set()
        from mizzen.kernels.gemm import w8a8_swap_ab

        swiglu = activation is not None and activation.kind is Activation.SILU
        specs: set[KernelSpec] = set()
        operands, smallest = self.operands, 0
        # Gate and up of batches that are too large for the kernel with SwiGLU may use the one without.
        for fused in (True, False) if swiglu else (False,):
            largest = max_batch(operands, swiglu=fused)
            sizes = [size for size in w8a8_swap_ab.BATCH_SIZES if smallest < size <= largest]
            for size in sizes:
                defer_pdl = self._defers_pdl(size) and not fused
                specs |= w8a8_swap_ab.kernel_specs(operands.weight, [size], swiglu=fused, defer_pdl=defer_pdl)
            smallest = largest
        return specs

    def _defers_pdl(self, count: int) -> bool:
        """Return whether the next kernel must not start during a product of `count` rows without SwiGLU."""
        return self.defer_pdl and count > MAX_EARLY_BATCH

    def _has_product(self, operands: Operands, count: int, *, swiglu: bool) -> bool:
        return operands.uses_library or count <= max_batch(operands, swiglu=swiglu)

    def _multiply(
        self, operands: Operands, inputs: QuantizedInputs, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply quantized inputs; return [tokens, rows], in `out` if given."""
        count = len(inputs.values)
        if count <= max_batch(operands, swiglu=False):
            from mizzen.kernels.gemm.w8a8_swap_ab import w8a8_swap_ab_gemm

            target = out if out is not None and out.is_contiguous() else None
            product = w8a8_swap_ab_gemm(operands.weight, inputs, target, defer_pdl=self._defers_pdl(count))
        else:
            target, product = None, library_gemm(operands, inputs)
        return product if out is None or out is target else out.copy_(product)

    def _multiply_glu(
        self, operands: Operands, inputs: QuantizedInputs, activation: GateActivation
    ) -> torch.Tensor:
        """Multiply quantized inputs by gate and up; return activation(gate) * up, [tokens, rows / 2]."""
        swiglu = activation.kind is Activation.SILU
        if swiglu and len(inputs.values) <= max_batch(operands, swiglu=True):
            from mizzen.kernels.gemm.w8a8_swap_ab import w8a8_swap_ab_gemm

            return w8a8_swap_ab_gemm(operands.weight, inputs, swiglu=True)
        product, consumer = self._multiply(operands, inputs), self.consumer
        if not swiglu or consumer is None or not consumer.accepts_prepared(len(product)):
            return activation.gate(product)
        return consumer.prepare_inputs(product)

    def accepts_prepared(self, count: int) -> bool:
        """Return whether `apply` accepts `count` rows of inputs from `prepare_inputs`."""
        return self.operands is not None and self._has_product(self.operands, count, swiglu=False)

    def prepare_inputs(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Quantize silu(gate) * up for the next call of `apply`, and return the codes, which it expects.

        `gate_up` is [tokens, 2 * columns], contiguous.

        Raises:
            RuntimeError: this method does not accept quantized inputs.
        """
        if self.operands is None:
            raise RuntimeError("the weight is not prepared for quantized inputs")
        from mizzen.kernels.quantization.inputs import quantize_inputs

        self.prepared_inputs = quantize_inputs(gate_up, self.operands.inputs, swiglu=True)
        return self.prepared_inputs.values


def max_batch(operands: Operands, *, swiglu: bool) -> int:
    """Return the largest batch that uses the small-batch kernel; `swiglu` is for SwiGLU layers."""
    from mizzen.kernels.gemm.w8a8_swap_ab import MAX_BATCH as MAX_SUPPORTED

    if not operands.uses_library:
        return MAX_SUPPORTED
    if operands.weight.grouped:
        return MAX_SWIGLU_GROUPED_BATCH if swiglu else MAX_GROUPED_BATCH
    if not swiglu:
        return MAX_BATCH
    return MAX_INT8_SWIGLU_BATCH if operands.weight.values.dtype == torch.int8 else MAX_SWIGLU_BATCH


def make_input_format(weight: QuantizedWeight) -> InputFormat:
    """Return the format of the inputs that a weight asks for."""
    from mizzen.kernels.quantization.inputs import InputFormat

    static = None
    if weight.input_scale:
        static = torch.tensor([weight.input_scale], device=weight.values.device)
    activations: Activations | None = weight.activations
    return InputFormat(
        dtype=torch.int8 if weight.codes is Codes.INT8 else torch.float8_e4m3fn,
        grouped=weight.scales.shape[1] > 1,
        static_scale=static,
        upper_bound=(activations.upper_bound if activations else None) or 0.0,
    )


def library_supports(weight: QuantizedWeight) -> bool:
    """Return whether the libraries' GEMMs support a weight with float32 scales, and are installed."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return False
    if weight.scales.shape[1] > 1:
        aligned = weight.rows % GROUP_COLUMNS == 0 and weight.columns % GROUP_COLUMNS == 0
        return aligned and weight.row_step == GROUP_COLUMNS
    return weight.rows % LIBRARY_MULTIPLE == 0 and weight.columns % LIBRARY_MULTIPLE == 0


def library_gemm(operands: Operands, inputs: QuantizedInputs) -> torch.Tensor:
    """Multiply quantized inputs by a weight with a library that is fast for its shape; [tokens, rows]."""
    weight, count = operands.weight, len(inputs.values)
    if weight.grouped:
        return multiply_blocks(weight, inputs, operands.library_bias)
    values, scales = weight.values.t(), inputs.scales.expand(count).contiguous()[:, None]
    int8 = weight.values.dtype == torch.int8
    if int8 or (count <= MAX_SGL_BATCH and len(weight.values) <= MAX_SGL_ROWS):
        sgl_kernel: Any = importlib.import_module("sgl_kernel")
        gemm = sgl_kernel.int8_scaled_mm if int8 else sgl_kernel.fp8_scaled_mm
        return gemm(inputs.values, values, scales, weight.scales, torch.bfloat16, operands.library_bias)
    by_row = ScalingType.RowWise
    return F.scaled_mm(
        inputs.values, values, scales, by_row, weight.scales.t(), by_row,
        bias=operands.library_bias, output_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


@functools.cache
def cublas_supports_blocks() -> bool:
    """Return whether the cuBLAS of PyTorch's CUDA supports scales of blocks."""
    version = torch.version.cuda
    return version is not None and tuple(map(int, version.split("."))) >= CUBLAS_BLOCKS_VERSION


def multiply_blocks(weight: W8A8Weight, inputs: QuantizedInputs, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply FP8 inputs by a weight, both with scales of blocks; return bfloat16 [tokens, rows]."""
    # Scales are stored for a multiple of four tokens, so unused rows after the tokens are multiplied, too.
    padded = (inputs.scales.shape[1], inputs.values.shape[1])
    x, values = inputs.values.as_strided(padded, (padded[1], 1)), weight.values.t()
    scales, weight_scales = inputs.scales.t(), weight.scales.t()
    if weight.scales.shape[1] % CUBLAS_GROUPS or not cublas_supports_blocks():
        sgl_kernel: Any = importlib.import_module("sgl_kernel")
        out = sgl_kernel.fp8_blockwise_scaled_mm(x, values, scales, weight_scales, torch.bfloat16)
    else:
        by_token, by_block = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        out = F.scaled_mm(x, values, scales, by_token, weight_scales, by_block, output_dtype=torch.bfloat16)
    out = out[: len(inputs.values)]
    return out if bias is None else out.add_(bias)
