# SPDX-License-Identifier: Apache-2.0
"""Products of tokens with their experts, and the choice of experts, by kernels of `mizzen.kernels.experts`.

All shapes are static and nothing is synchronised with the host, so that CUDA graphs can capture both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from mizzen.kernels.experts.align import AlignedPairs, align_pairs
from mizzen.kernels.experts.few_rows import down_rows, gate_up_rows
from mizzen.kernels.experts.gate import KINDS, Gate
from mizzen.kernels.experts.grouped_gemm import down_grouped, gate_up_grouped
from mizzen.kernels.experts.many_rows import ManyRowsExperts, ManyRowsOperand, supports_columns
from mizzen.kernels.experts.route import MAX_TOKENS, RouterKernel
from mizzen.kernels.experts.router import LOGITS_ROWS, RoutingRules, choose_experts, router_logits
from mizzen.kernels.experts.sorted_pairs import MAX_EXPERTS, sort_pairs
from mizzen.kernels.experts.weighted_sum import sum_pairs
from mizzen.kernels.launch import has_wgmma
from mizzen.kernels.nvrtc import can_compile_all
from mizzen.kernels.quantization.inputs import MAX_FEW_TOKENS
from mizzen.layers.activation import ClampedSwiGLU
from mizzen.layers.experts.biases import ExpertBiases
from mizzen.layers.experts.kernel_plans import (
    HOPPER_PLAN,
    CodedMma,
    CodedWgmma,
    ExpertKernelPlan,
    ExpertSizes,
    FewMma,
    FewRows,
    Grouped,
    Library,
    ManyRows,
    Variant,
)
from mizzen.layers.experts.products import ExpertProduct, GroupedProduct
from mizzen.layers.experts.router import ExpertRouter
from mizzen.layers.linear_methods.base import GateActivation
from mizzen.models.experts_config import Scoring


def make_gate(activation: GateActivation) -> Gate:
    """Return the gate of kernels for an activation, whose kind must be a key of `KINDS`."""
    if isinstance(activation, ClampedSwiGLU):
        return Gate(activation.kind, activation.limit, activation.slope)
    return Gate(activation.kind)


class PlannedProduct(ABC):
    """Multiplies tokens by their experts with kernels that a plan chooses by the size of the batch.

    A token's result is the same in all batches that use the same variant. Between variants, float32 sums
    round differently, and only some round each expert's output to the model's data type before the sum.
    `ManyRows` of E4M3 experts also rounds inputs and inner elements to E4M3.
    """

    def __init__(
        self,
        activation: GateActivation,
        biases: ExpertBiases | None,
        library: ExpertProduct,
        *,
        sizes: ExpertSizes,
        held: int,
        dtype: torch.dtype,
        device: torch.device,
        plan: ExpertKernelPlan,
        many_rows: ManyRowsExperts | None = None,
    ) -> None:
        """Keep what the product needs besides the weights.

        Args:
            activation: Activation function of the gate.
            biases: Biases of the projections, if they have any.
            library: The product with the same weights that runs batches of the variant `Library`.
            sizes: Sizes of the layer, with the experts of other ranks.
            held: Number of experts that this rank holds.
            dtype: Data type of inputs.
            device: Device of the weights.
            plan: Variants by size.
            many_rows: Experts for the variant `ManyRows`; None if its kernel does not support them.
        """
        self.gate, self.library, self.many_rows = make_gate(activation), library, many_rows
        self.plan = plan
        if many_rows is None and plan is not None and plan.many_rows:
            self.plan = replace(plan, many_rows=())
        self.sizes, self.held, self.dtype, self.device = sizes, held, dtype, device
        self.gate_up_bias = None if biases is None else biases.gate_up
        self.down_bias = None if biases is None else biases.down

    @abstractmethod
    def run_few_rows(
        self,
        tiles: FewRows,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        added: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the sums of outputs by the kernels for few rows; for the arguments see `run`."""

    @abstractmethod
    def run_grouped(
        self, tiles: Grouped, x: torch.Tensor, aligned: AlignedPairs, per_token: int
    ) -> torch.Tensor:
        """Return the outputs of all pairs [pairs, hidden] by grouped GEMMs.

        Args:
            tiles: Tilings of the GEMMs.
            x: Inputs [tokens, hidden].
            aligned: The pairs by their experts, in blocks of the tiles' rows.
            per_token: Number of experts of each token.
        """

    def run_coded_mma(
        self, tiles: CodedMma | CodedWgmma, x: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of all pairs [pairs, hidden]; only plans of quantized experts have the variants.

        For the arguments see `run`.

        Raises:
            TypeError: The experts are not quantized.
        """
        raise TypeError(f"{type(self).__name__} has no {tiles}")

    def run_few_mma(
        self,
        tiles: FewMma,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        added: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the sums of outputs; only plans of quantized experts have the variant. See `run`.

        Raises:
            TypeError: The experts are not quantized.
        """
        raise TypeError(f"{type(self).__name__} has no {tiles}")

    def many_rows_inputs(self, x: torch.Tensor) -> ManyRowsOperand:
        """Return the inputs x [tokens, hidden] in the type of the weights of `many_rows`."""
        return ManyRowsOperand(values=x)

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden]; see `ExpertProduct`."""
        return self.run(x, chosen, weights, dtype=torch.float32)

    def run(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        *,
        added: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        variant: Variant | None = None,
    ) -> torch.Tensor:
        """Return this rank's sums of outputs [tokens, hidden].

        Args:
            x: Inputs [tokens, hidden].
            chosen: Experts of each token, int64 [tokens, experts per token]; indices outside [0, held)
                contribute nothing.
            weights: Factors of their outputs, float32 of the same shape.
            added: Tensor [tokens, hidden] that is added before the sum is rounded.
            dtype: Data type of the sums; that of x by default.
            variant: Kernels and tiles; those of the plan by default.
        """
        tokens, per_token = chosen.shape
        x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
        dtype = dtype or x.dtype
        match variant or self.plan.variant(tokens, per_token, self.sizes):
            case FewRows() as tiles:
                return self.run_few_rows(tiles, x, chosen, weights, added, dtype)
            case Grouped() as tiles:
                aligned = align_pairs(chosen, self.held, tiles.gate_up.rows)
                outputs = self.run_grouped(tiles, x, aligned, per_token)
                return sum_pairs(outputs, chosen, weights, self.held, added, dtype)
            case CodedMma() | CodedWgmma() as tiles:
                outputs = self.run_coded_mma(tiles, x, chosen)
                return sum_pairs(outputs, chosen, weights, self.held, added, dtype)
            case FewMma() as tiles:
                return self.run_few_mma(tiles, x, chosen, weights, added, dtype)
            case ManyRows(tile):
                if self.many_rows is None:
                    raise TypeError(f"{type(self).__name__} has no {tile}")
                pairs = sort_pairs(chosen, self.held, tile.block)
                inputs = self.many_rows_inputs(x)
                outputs = self.many_rows.multiply(inputs, per_token, pairs, tile)
                return sum_pairs(outputs, chosen, weights, self.held, added, dtype)
            case Library():
                total = self.library(x, chosen, weights)
                return (total if added is None else total.add_(added)).to(dtype)

    def compile(self, per_token: int, *, adds: bool) -> None:
        """Compile the kernels of all variants, for tokens with that many experts.

        Each variant runs for one token without experts, and so reads no weights. The library compiles
        nothing. `adds` says whether `run` will get a tensor to add. Without the compiler of `ManyRows`, the
        plan loses these.
        """
        if self.many_rows is not None:
            tiles = (variant.tile for _, variant in self.plan.many_rows)
            kernels = frozenset(kernel for tile in tiles for kernel in self.many_rows.kernels(tile))
            fallback = "large batches use other kernels of experts"
            if kernels and not can_compile_all(kernels, self.device, fallback):
                self.plan = replace(self.plan, many_rows=())
        x = torch.zeros(1, self.sizes.hidden, dtype=self.dtype, device=self.device)
        none = torch.full((1, per_token), self.held, dtype=torch.int64, device=self.device)
        weights = torch.zeros(1, per_token, device=self.device)
        for variant in self.plan.variants:
            self.run(x, none, weights, added=x if adds else None, variant=variant)
        if self.plan.many_rows:
            self.many_rows_inputs(x.new_zeros(MAX_FEW_TOKENS + 1, self.sizes.hidden))


class KernelProduct(PlannedProduct):
    """Multiplies tokens by experts that are not quantized."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: GateActivation,
        biases: ExpertBiases | None,
        library: ExpertProduct,
        *,
        experts: int,
        plan: ExpertKernelPlan = HOPPER_PLAN,
    ) -> None:
        """Keep the weights `gate_up` [held, 2 * width, hidden] and `down` [held, hidden, width].

        `experts` is the number of experts of the layer; for the other arguments see `PlannedProduct`.
        """
        held, hidden, width = down.shape
        sizes = ExpertSizes(experts, hidden, width)
        many_rows: ManyRowsExperts | None = None
        if (
            down.dtype == torch.bfloat16
            and supports_columns(hidden, width, fp8=False)
            and held <= MAX_EXPERTS
        ):
            many_rows = ManyRowsExperts(
                gate_up=ManyRowsOperand(values=gate_up.view(-1, hidden)),
                down=ManyRowsOperand(values=down.view(-1, width)),
                held=held,
                gate=make_gate(activation),
                gate_up_bias=None if biases is None else biases.gate_up,
                down_bias=None if biases is None else biases.down,
            )
        super().__init__(
            activation,
            biases,
            library,
            sizes=sizes,
            held=held,
            dtype=down.dtype,
            device=down.device,
            plan=plan,
            many_rows=many_rows,
        )
        self.gate_up, self.down = gate_up, down

    @staticmethod
    def supports(gate_up: torch.Tensor, down: torch.Tensor, activation: GateActivation) -> bool:
        """Return whether the kernels support the device, type and sizes of the weights, and the gate."""
        return (
            activation.kind in KINDS
            and has_wgmma(gate_up.device)
            and GroupedProduct.supports(gate_up, down)
            and gate_up.is_contiguous()
            and down.is_contiguous()
        )

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
        inner = gate_up_rows(x, chosen, self.gate_up, self.gate, tiles.gate_up, self.gate_up_bias)
        return down_rows(inner, chosen, weights, self.down, tiles.down, self.down_bias, added, dtype)

    def run_grouped(
        self, tiles: Grouped, x: torch.Tensor, aligned: AlignedPairs, per_token: int
    ) -> torch.Tensor:
        """Return the outputs of all pairs by two grouped GEMMs; see `PlannedProduct`."""
        inner = gate_up_grouped(
            x, per_token, aligned, self.gate_up, self.gate, tiles.gate_up, self.gate_up_bias
        )
        return down_grouped(inner, aligned, self.down, tiles.down, self.down_bias)


class KernelRouter:
    """Chooses experts in one launch, or in one after the logits; the result is that of an `ExpertRouter`."""

    def __init__(self, router: ExpertRouter, held: slice | None = None) -> None:
        """Take weights and rules of `router`.

        With `held`, experts have their indices among these ones in the result, as by `HeldExperts.localize`,
        and all others have the weight 0.
        """
        self.router, self.config, self.held = router, router.config, held
        self.rules = make_rules(router)
        self.kernel: RouterKernel | None = None
        """The kernel for all of it, if it supports the router."""
        if RouterKernel.supports(router.weight, self.rules, router.logit_bias, router.bias):
            self.kernel = RouterKernel(
                router.weight,
                self.rules,
                held or slice(0, self.rules.count),
                logit_bias=router.logit_bias,
                correction=router.bias,
            )

    def __call__(
        self, x: torch.Tensor, live: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of x [tokens, hidden]; see `ExpertRouter` and `choose_experts`."""
        router = self.router
        if self.kernel is not None and x.dtype == torch.bfloat16 and len(x) <= MAX_TOKENS:
            return self.kernel(x.contiguous(), live)
        if len(x) <= LOGITS_ROWS:
            logits, logit_bias = router_logits(x.contiguous(), router.weight), router.logit_bias
        else:
            logits, logit_bias = router.compute_logits(x), None
        return choose_experts(
            logits,
            self.rules,
            logit_bias=logit_bias,
            correction=router.bias,
            held=self.held,
            live=live,
        )

    def compile(self, dtype: torch.dtype) -> None:
        """Compile the kernels for small and large batches of a data type, with and without padding."""
        weight = self.router.weight
        if self.kernel is not None and not self.kernel.can_compile():
            self.kernel = None
        for rows in (1, LOGITS_ROWS + 1) if self.kernel is None else (MAX_TOKENS + 1,):
            x = weight.new_zeros(rows, weight.shape[1], dtype=dtype)
            for live in (None, torch.ones(rows, dtype=torch.bool, device=x.device)):
                self(x, live)


def make_rules(router: ExpertRouter) -> RoutingRules:
    """Return the rules by which a router chooses experts.

    Raises:
        ValueError: The kernel that chooses experts lacks the router's scoring.
    """
    config = router.config
    if config.scoring is Scoring.SPARSEMIXER:
        raise ValueError(f"{config.scoring} has no kernel: call the router itself")
    return RoutingRules(
        count=config.count,
        per_token=config.per_token,
        softmax=config.scoring is Scoring.SOFTMAX,
        groups=config.groups,
        top_groups=config.top_groups,
        renormalize=config.renormalize,
        sum_floor=config.sum_floor,
        scale=config.scale,
    )


class ExpertKernels:
    """The kernels of a mixture: those of its product, and those of its router unless PyTorch computes it."""

    def __init__(self, router: KernelRouter | ExpertRouter, product: PlannedProduct) -> None:
        self.router, self.product = router, product

    @property
    def localizes(self) -> bool:
        """Whether the router gives experts their indices among the experts of this rank."""
        return isinstance(self.router, KernelRouter) and self.router.held is not None

    def compile(self, *, adds: bool) -> None:
        """Compile all kernels; `adds` says whether calls will get a tensor to add."""
        if isinstance(self.router, KernelRouter):
            self.router.compile(self.product.dtype)
        self.product.compile(self.router.config.per_token, adds=adds)
