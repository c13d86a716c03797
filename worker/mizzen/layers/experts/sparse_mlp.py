# SPDX-License-Identifier: Apache-2.0
"""The feed-forward block of a layer with experts, with the interface of a dense one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from mizzen.layers.activation import ActivationFunction, make_activation
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.mxfp4_weights import Mxfp4ExpertWeights
from mizzen.layers.experts.products import ExpertProduct, make_product
from mizzen.layers.experts.quantized_products import make_quantized_product
from mizzen.layers.experts.quantized_weights import QuantizedExpertWeights
from mizzen.layers.experts.router import ExpertRouter
from mizzen.layers.experts.stored_weights import StoredExpertWeights
from mizzen.layers.experts.weights import ExpertWeights
from mizzen.layers.linear import all_reduce_add_norm
from mizzen.layers.linear_methods.base import InputNorm, LinearMethod
from mizzen.layers.mlp import MLP
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig
from mizzen.models.experts_config import ExpertsConfig, Scoring
from mizzen.quantization.schemes import Mxfp4Weights, Unquantized

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec
    from mizzen.layers.experts.kernel_product import ExpertKernels


class SharedExpert:
    """The expert that all tokens run through: a dense block, whose output may be multiplied by a gate."""

    def __init__(self, build: BuildContext, config: ModelConfig, experts: ExpertsConfig, prefix: str) -> None:
        names = experts.names
        self.mlp = MLP(
            build, config, f"{prefix}{names.shared}.", size=experts.shared_width, field=experts.shared_field
        )
        self.gate_name = f"{prefix}{names.shared_gate}.weight"
        self.gate = build.allocate(1, config.hidden_size) if experts.shared_gate else None

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.mlp.targets()
        if self.gate is not None:
            yield WeightTarget(
                name=self.gate_name,
                shape=tuple(self.gate.shape),
                shard=tuple(slice(0, size) for size in self.gate.shape),
                destination=self.gate,
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's partial sum [tokens, hidden] for x [tokens, hidden]."""
        output = self.mlp(x)
        return output if self.gate is None else output * (x @ self.gate.t()).sigmoid()


def make_experts(
    build: BuildContext, config: ModelConfig, experts: ExpertsConfig, prefix: str
) -> tuple[ExpertWeights | StoredExpertWeights, ExpertProduct]:
    """Make the weights of the experts of one layer, and the product of tokens with them.

    Raises:
        ConfigError: The experts have different schemes, or their scheme is not supported.
    """
    activation = make_activation(build, config.block, prefix)
    names = experts.gate_up_layers(prefix) + experts.down_layers(prefix)
    scheme = config.quantization.find_merged_scheme(names)
    if isinstance(scheme, Unquantized):
        weights = ExpertWeights(build, experts, config.hidden_size, prefix)
        return weights, make_product(weights.gate_up, weights.down, activation, weights.biases)
    if isinstance(scheme, Mxfp4Weights):
        quantized: StoredExpertWeights = Mxfp4ExpertWeights(build, experts, config.hidden_size, prefix)
    else:
        quantized = QuantizedExpertWeights(
            build, experts, config.hidden_size, prefix, scheme, online=config.quantization.online
        )
    return quantized, make_quantized_product(quantized, activation, build.device, fused=build.fused)


def make_kernels(
    router: ExpertRouter,
    weights: ExpertWeights | StoredExpertWeights,
    activation: ActivationFunction,
    product: ExpertProduct,
    *,
    localizes: bool,
) -> ExpertKernels | None:
    """Return the kernels of a mixture, or None if they do not support its device, type, sizes, activation
    or router.

    `product` runs the batches for which it is faster than the kernels. Quantized weights must be loaded.
    `localizes` says that the kernels' router may replace the experts' indices by those among the held ones.
    SparseMixer, which has no kernel, is computed by PyTorch.
    """
    from mizzen.layers.experts.coded_kernel_product import make_coded_product
    from mizzen.layers.experts.kernel_product import ExpertKernels, KernelProduct, KernelRouter, make_rules

    sparsely = router.config.scoring is Scoring.SPARSEMIXER
    if not sparsely and not make_rules(router).supported:
        return None
    experts = weights.config.count
    if isinstance(weights, StoredExpertWeights):
        kernels = make_coded_product(weights, activation, product, experts=experts)
    elif KernelProduct.supports(weights.gate_up, weights.down, activation):
        kernels = KernelProduct(
            weights.gate_up, weights.down, activation, weights.biases, product, experts=experts
        )
    else:
        kernels = None
    if kernels is None:
        return None
    if sparsely:
        return ExpertKernels(router, kernels)
    return ExpertKernels(KernelRouter(router, weights.held if localizes else None), kernels)


class Mixture:
    """Router, experts and shared expert of one layer."""

    def __init__(self, build: BuildContext, config: ModelConfig, experts: ExpertsConfig, prefix: str) -> None:
        self.router = ExpertRouter(build, experts, config.hidden_size, prefix)
        self.weights, self.product = make_experts(build, config, experts, prefix)
        weights = self.weights
        self.partial_weights = weights if weights.partial else None
        """Weights of some of the experts, if other ranks hold the others and the router does not localize."""
        self.shared = SharedExpert(build, config, experts, prefix) if experts.shared_width else None
        self.keeps_choice = build.counts_experts
        self.chosen: torch.Tensor | None = None
        """Choice of the last step, int64 [tokens, experts per token]; see `ExpertLoad`."""
        self.live: torch.Tensor | None = None
        """Rows of this step's inputs that are not padding, bool [tokens]; None if all are. Others go to no
        expert."""
        self.kernels: ExpertKernels | None = None
        self.gate = make_activation(build, config.block, prefix) if build.fused else None
        """Activation function of the experts' gates, if kernels may be used."""
        if isinstance(weights, ExpertWeights):
            self._use_kernels()

    def finish(self) -> None:
        """Prepare the loaded weights, and compile the kernels of the router and the experts, if any are used.

        Raises:
            WeightsError: A tensor has invalid values.
        """
        if isinstance(self.weights, StoredExpertWeights):
            self.weights.finish()
            self._use_kernels()
        if self.kernels is not None:
            self.kernels.compile(adds=self.shared is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run x [tokens, hidden] through its experts; return this rank's partial sum [tokens, hidden].

        Every inner element of every expert is on one rank, also those of the shared expert, so that the sum
        over ranks contains every output once.
        """
        router = self.router if self.kernels is None else self.kernels.router
        chosen, weights = router(x, self.live)
        if self.keeps_choice:
            self.chosen = chosen
        if self.partial_weights is not None:
            chosen = self.partial_weights.localize(chosen)
        if self.kernels is not None:
            added = None if self.shared is None else self.shared(x)
            return self.kernels.product.run(x, chosen, weights, added=added)
        total = self.product(x, chosen, weights)
        if self.shared is not None:
            total.add_(self.shared(x))
        return total.to(x.dtype)

    def _use_kernels(self) -> None:
        """Use kernels for the router and the experts, if they are supported."""
        if self.gate is None:
            return
        localizes = self.partial_weights is not None and not self.keeps_choice
        self.kernels = make_kernels(self.router, self.weights, self.gate, self.product, localizes=localizes)
        if self.kernels is not None and self.kernels.localizes:
            self.partial_weights = None

    def add_to_residual(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Return the partial sum [tokens, hidden] for x, which the caller must add to `residual`."""
        return self(x)


class SparseMLP:
    """A feed-forward block in which a router chooses the experts that each token runs through.

    Its `gate` and its projections differ from those of `MLP`: all of the block is in `down`, since the router
    needs the block's input.
    """

    def __init__(self, build: BuildContext, config: ModelConfig, experts: ExpertsConfig, prefix: str) -> None:
        self.collectives = build.collectives
        self.down = Mixture(build, config, experts, prefix)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.down.router.targets()
        yield from self.down.weights.targets()
        if self.down.shared is not None:
            yield from self.down.shared.targets()

    def finish(self) -> None:
        """Prepare the loaded weights, and compile kernels before any graph is captured."""
        self.down.finish()
        if self.down.shared is not None:
            self.down.shared.mlp.finish()

    def apply_after_norm(
        self, norm: InputNorm, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream and normalise it; see `MLP.apply_after_norm`.

        Returns:
            The input [tokens, hidden] of `down`, and the residual stream with `x` added.
        """
        if x is not None and self.collectives.size > 1:
            inputs, x = all_reduce_add_norm(self.collectives, norm, x, residual)
            if inputs is not None:
                return inputs, residual
        return norm(residual) if x is None else norm.add(x, residual), residual

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to x [tokens, hidden]; return this rank's partial sum [tokens, hidden]."""
        return self.down(x)

    def gate_up_methods(self) -> list[LinearMethod]:
        """Return the linear methods whose outputs are gate and up."""
        return self.down.shared.mlp.gate_up_methods() if self.down.shared is not None else []

    def kernel_specs(self, batch_sizes: Collection[int]) -> set[KernelSpec]:
        """Return the specs of kernels to compile at start-up for these batch sizes."""
        return self.down.shared.mlp.kernel_specs(batch_sizes) if self.down.shared is not None else set()


def make_mlp(build: BuildContext, config: ModelConfig, layer: int, prefix: str) -> MLP | SparseMLP:
    """Make the feed-forward block of the layer number `layer`, whose tensors' names begin with `prefix`."""
    experts = config.experts
    if experts is None or not experts.layers[layer]:
        return MLP(build, config, f"{prefix}{config.block.names.mlp}.")
    return SparseMLP(build, config, experts, f"{prefix}{experts.names.block}.")
