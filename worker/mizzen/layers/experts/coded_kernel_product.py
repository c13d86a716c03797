# SPDX-License-Identifier: Apache-2.0
"""Products of tokens with quantized experts by the kernels of unquantized ones, which decode weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from mizzen.kernels.experts import coded_mma, coded_wgmma, few_mma
from mizzen.kernels.experts.align import AlignedPairs
from mizzen.kernels.experts.few_coded_rows import down_coded_rows, gate_up_coded_rows
from mizzen.kernels.experts.gate import KINDS
from mizzen.kernels.experts.grouped_coded import (
    down_grouped_coded,
    gate_up_grouped_coded,
    put_in_parts,
)
from mizzen.kernels.experts.many_rows import (
    GROUP_COLUMNS,
    ManyRowsExperts,
    ManyRowsOperand,
    supports_columns,
)
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.kernels.experts.sorted_pairs import MAX_EXPERTS
from mizzen.kernels.launch import has_wgmma
from mizzen.kernels.nvrtc import KernelSpec, can_compile_all
from mizzen.kernels.quantization.inputs import InputFormat, quantize_inputs
from mizzen.layers.experts.coded_kernel_plans import find_plan
from mizzen.layers.experts.kernel_plans import (
    CodedMma,
    CodedWgmma,
    ExpertKernelPlan,
    ExpertSizes,
    FewMma,
    FewRows,
    Grouped,
    SmallBatch,
)
from mizzen.layers.experts.kernel_product import PlannedProduct, make_gate
from mizzen.layers.experts.products import ExpertProduct
from mizzen.layers.experts.quantized_kernel_product import make_matrices
from mizzen.layers.experts.stored_weights import StoredExpertWeights
from mizzen.layers.linear_methods.base import GateActivation
from mizzen.layers.quantized.canonical import Codes

GROUPED_E4M3 = InputFormat(dtype=torch.float8_e4m3fn, grouped=True)
"""Form of inputs of the variant `ManyRows`."""


class CodedKernelProduct(PlannedProduct):
    """Multiplies tokens by quantized experts, whose codes the kernels decode."""

    def __init__(
        self,
        weights: StoredExpertWeights,
        activation: GateActivation,
        library: ExpertProduct,
        *,
        experts: int,
        plan: ExpertKernelPlan,
    ) -> None:
        """Keep loaded weights that `supports` accepts; their codes are not copied.

        `experts` is the number of experts of the layer; for the other arguments see `PlannedProduct`.
        """
        self.gate_up, self.down = make_matrices(weights.gate_up), make_matrices(weights.down)
        super().__init__(
            activation,
            weights.biases,
            library,
            sizes=ExpertSizes(experts, self.down.rows, self.down.columns),
            held=self.down.experts,
            dtype=weights.dtype,
            device=self.down.values.device,
            plan=plan,
            many_rows=make_many_rows(weights, self.gate_up, self.down, activation),
        )
        self.no_down_bias: torch.Tensor | None = None
        """Zeros [held, hidden] if another rank adds the biases of the down projection, else None."""
        if self.gate_up_bias is not None and self.down_bias is None:
            self.no_down_bias = self.gate_up_bias.new_zeros(self.held, self.sizes.hidden)

    @staticmethod
    def supports(weights: StoredExpertWeights, activation: GateActivation) -> bool:
        """Return whether the kernels support the device, codes and sizes of loaded weights, and the gate."""
        return activation.kind in KINDS and all(
            has_wgmma(experts.weight.values.device) and make_matrices(experts).decodable
            for experts in (weights.gate_up, weights.down)
        )

    @property
    def supports_coded_mma(self) -> bool:
        """Whether the kernels of `CodedMma`, and of `FewMma` with FP8, support weights and inputs."""
        return self.dtype == torch.bfloat16 and all(
            coded_mma.supports(matrices, has_gate=has_gate)
            for matrices, has_gate in ((self.gate_up, True), (self.down, False))
        )

    @property
    def supports_coded_wgmma(self) -> bool:
        """Whether the kernel of `CodedWgmma` supports the weights and the data type of inputs."""
        return self.dtype == torch.bfloat16 and coded_wgmma.supports(self.gate_up, self.down)

    def supported_plan(self) -> ExpertKernelPlan:
        """Return the plan with those variants of `coded_mma` that support the weights and may be used."""
        kept: tuple[tuple[float, SmallBatch], ...] = ()
        for limit, variant in self.plan.coded_mma:
            if isinstance(variant, CodedWgmma):
                supported = self.supports_coded_wgmma and variant.tile.fits(
                    self.gate_up.columns, self.down.columns
                )
            else:
                supported = self.supports_coded_mma
            if supported and (not kept or limit > kept[-1][0]):
                kept = (*kept, (limit, variant))
        return self.plan if kept == self.plan.coded_mma else replace(self.plan, coded_mma=kept)

    @property
    def most_columns(self) -> int:
        """The larger number of columns of both projections."""
        return max(self.gate_up.columns, self.down.columns)

    def compile(self, per_token: int, *, adds: bool) -> None:
        """Compile the kernels of all variants; without the compiler, the plan loses its `coded_mma`.

        The plan also loses the tiles of `FewMma` that do not fit.
        """
        fitting = tuple(entry for entry in self.plan.coded_mma if self.fits(entry[1], per_token))
        self.plan = replace(self.plan, coded_mma=fitting)
        kernels = frozenset(
            kernel for _, tiles in fitting for kernel in self.mma_kernels(tiles, per_token, adds=adds)
        )
        fallback = "small batches use other kernels of experts"
        if kernels and not can_compile_all(kernels, self.device, fallback):
            self.plan = replace(self.plan, coded_mma=())
        super().compile(per_token, adds=adds)

    def fits(self, tiles: SmallBatch, per_token: int) -> bool:
        """Return whether blocks of a variant have few enough threads and little enough shared memory."""
        if not isinstance(tiles, FewMma):
            return True
        return tiles.gate_up.fits(self.gate_up, 1) and tiles.down.fits(self.down, per_token)

    def mma_kernels(
        self, tiles: SmallBatch, per_token: int, *, adds: bool
    ) -> Iterator[tuple[KernelSpec, int]]:
        """Yield the specs of a variant's kernels, each with the shared memory of a block in bytes.

        `adds` says whether `run` will get a tensor to add.
        """
        biased = self.gate_up_bias is not None
        if isinstance(tiles, FewMma):
            spec = few_mma.kernel_spec(self.gate_up, tiles.gate_up, self.gate, per_token, biased=biased)
            yield spec, tiles.gate_up.shared_bytes(self.gate_up, 1)
            biased = self.down_bias is not None
            spec = few_mma.kernel_spec(self.down, tiles.down, None, per_token, biased=biased, adds=adds)
            yield spec, tiles.down.shared_bytes(self.down, per_token)
            return
        if isinstance(tiles, CodedWgmma):
            yield coded_wgmma.inputs_spec(self.gate_up, self.down, per_token), 0
            spec = coded_wgmma.kernel_spec(self.gate_up, self.down, tiles.tile, self.gate, biased=biased)
            yield spec, tiles.tile.shared_bytes(self.most_columns)
            return
        spec = coded_mma.kernel_spec(self.gate_up, tiles.gate_up, self.gate, per_token, biased=biased)
        yield spec, tiles.gate_up.shared_bytes(self.gate_up)
        spec = coded_mma.kernel_spec(self.down, tiles.down, None, 1, biased=self.down_bias is not None)
        yield spec, tiles.down.shared_bytes(self.down)

    def run_coded_mma(
        self, tiles: CodedMma | CodedWgmma, x: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of all pairs by two kernels; see `PlannedProduct`."""
        if isinstance(tiles, CodedWgmma):
            return coded_wgmma.multiply_pairs(
                x,
                chosen,
                self.gate_up,
                self.down,
                self.gate,
                tiles.tile,
                self.gate_up_bias,
                self.down_bias if self.no_down_bias is None else self.no_down_bias,
            )
        inner = coded_mma.gate_up_coded_mma(
            x, chosen, self.gate_up, self.gate, tiles.gate_up, self.gate_up_bias
        )
        return coded_mma.down_coded_mma(inner, chosen, self.down, tiles.down, self.down_bias)

    def run_few_mma(
        self,
        tiles: FewMma,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        added: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the sums of outputs by two kernels; see `PlannedProduct`."""
        inner = few_mma.gate_up_few_mma(x, chosen, self.gate_up, self.gate, tiles.gate_up, self.gate_up_bias)
        return few_mma.down_few_mma(
            inner, chosen, weights, self.down, tiles.down, self.down_bias, added, dtype
        )

    def many_rows_inputs(self, x: torch.Tensor) -> ManyRowsOperand:
        """Return x [tokens, hidden] in E4M3; see `PlannedProduct`."""
        quantized = quantize_inputs(x, GROUPED_E4M3)
        return ManyRowsOperand(values=quantized.values, scales=quantized.scales)

    def run_few_rows(
        self,
        tiles: FewRows,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        added: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the sums of outputs by two kernels; see `PlannedProduct`."""
        inner = gate_up_coded_rows(x, chosen, self.gate_up, self.gate, tiles.gate_up, self.gate_up_bias)
        return down_coded_rows(inner, chosen, weights, self.down, tiles.down, self.down_bias, added, dtype)

    def run_grouped(
        self, tiles: Grouped, x: torch.Tensor, aligned: AlignedPairs, per_token: int
    ) -> torch.Tensor:
        """Return the outputs of all pairs by two grouped GEMMs; see `PlannedProduct`."""
        inner = gate_up_grouped_coded(
            put_in_parts(x, self.gate_up.parts),
            per_token,
            aligned,
            self.gate_up,
            self.gate,
            tiles.gate_up,
            self.gate_up_bias,
            out_parts=self.down.parts,
        )
        return down_grouped_coded(inner, aligned, self.down, tiles.down, self.down_bias)


def make_many_rows(
    weights: StoredExpertWeights, gate_up: ExpertMatrices, down: ExpertMatrices, activation: GateActivation
) -> ManyRowsExperts | None:
    """Return the experts for the variant `ManyRows`, which multiplies E4M3 by inputs rounded to E4M3.

    Returns:
        The experts; None if the format does not have such inputs, or the kernel does not support the weights.
    """
    rounds = all(each.weight.activations is not None for each in (weights.gate_up, weights.down))
    if not rounds or weights.dtype != torch.bfloat16 or down.experts > MAX_EXPERTS:
        return None
    if not supports_columns(down.rows, down.columns, fp8=True):
        return None
    for matrices in (gate_up, down):
        plain = matrices.codes is Codes.E4M3 and matrices.zeros is None and matrices.orders is None
        if not plain or not (matrices.by_row or matrices.column_step == GROUP_COLUMNS):
            return None
    biases = weights.biases
    return ManyRowsExperts(
        gate_up=make_operand(gate_up),
        down=make_operand(down),
        held=down.experts,
        gate=make_gate(activation),
        gate_up_bias=None if biases is None else biases.gate_up,
        down_bias=None if biases is None else biases.down,
    )


def make_operand(matrices: ExpertMatrices) -> ManyRowsOperand:
    """Return E4M3 weights for the variant `ManyRows`; codes are not copied, scales are if they are narrow."""
    return ManyRowsOperand(
        values=matrices.values, scales=matrices.scales.float().contiguous(), row_step=matrices.row_step
    )


def make_coded_product(
    weights: StoredExpertWeights,
    activation: GateActivation,
    library: ExpertProduct,
    *,
    experts: int,
) -> CodedKernelProduct | None:
    """Make a product with loaded weights; see `CodedKernelProduct`.

    Returns:
        The product; None if the kernels do not support the device, the format, the sizes or the gate, or if
        no plan for the format has been measured.
    """
    if not CodedKernelProduct.supports(weights, activation):
        return None
    if (plan := find_plan(weights.gate_up.weight, weights.down.weight)) is None:
        return None
    product = CodedKernelProduct(weights, activation, library, experts=experts, plan=plan)
    product.plan = product.supported_plan()
    return product
