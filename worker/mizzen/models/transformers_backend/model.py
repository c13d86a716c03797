# SPDX-License-Identifier: Apache-2.0
"""`TransformersModel`: a model of Transformers with the interface of `mizzen.models.base.DecoderModel`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_outputs import MoeModelOutputWithPast

from mizzen.attention.base import StepAttention
from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.base import GateActivation, LinearMethod, without_prefill_fusion
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig
from mizzen.models.image_rows import BatchImages
from mizzen.models.pooling.output import PooledOutput
from mizzen.models.transformers_backend import attention
from mizzen.models.transformers_backend.deferred_add import DeferredAdds
from mizzen.models.transformers_backend.linears import GatedMLP, HeadModule, Replacement
from mizzen.models.transformers_backend.meta_run import record_calls
from mizzen.models.transformers_backend.parameters import allocate_parameters
from mizzen.models.transformers_backend.replacement import Replacer
from mizzen.models.transformers_backend.rotation import can_defer_rotation, defer_rotation, restore_rotation

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec


class DecoderOutput(MoeModelOutputWithPast):
    """Output of a decoder, with the fields that any head may read."""

    cross_attentions = None


class GivenStates(nn.Module):
    """Replaces the decoder in a causal language model, so that only the head runs."""

    @property
    def decoder(self) -> GivenStates:
        """This module, because some models call the decoder within their base model."""
        return self

    def forward(self, input_ids: Any = None, *, inputs_embeds: Any = None, **options: Any) -> DecoderOutput:
        """Return the given hidden states [1, rows, hidden] as the decoder's result."""
        return DecoderOutput(last_hidden_state=inputs_embeds)


class TransformersModel:
    """Causal language model of Transformers that runs in Mizzen; holds the shard of one rank."""

    def __init__(self, build: BuildContext, config: ModelConfig, model: Any, *, replace: bool) -> None:
        """Replace modules of a model, and allocate its parameters.

        Args:
            build: Settings of the layers.
            config: Configuration of the model.
            model: Causal language model of Transformers, built on the meta device; it is changed.
            replace: Whether norms, feed-forward blocks and rotations are replaced by Mizzen's.

        Raises:
            ConfigError: the model cannot be served; the message names the reason.
        """
        self.config = config
        self.collectives = build.collectives
        self.dtype = build.dtype
        self.pooled = PooledOutput(build.device)
        self.causal = model
        self.step = attention.Step()
        self.conversions = get_model_conversion_mapping(model)
        """Transformers' rules for the names of checkpoint tensors."""
        modules = [call.module for call in record_calls(model)]
        self.attention_modules = modules
        self.defers_rotation = replace and can_defer_rotation(model, modules)
        """Whether the attention applies RoPE instead of the model's own function."""
        replacer = Replacer(build, model, recognise=replace)
        self.base: Any = replacer.base
        embedding = replacer.replace_embedding()
        replacer.replace_head(embedding, tied=config.tie_embeddings)
        replacer.replace_all()
        self.embedding = self.base.get_input_embeddings()
        self.kept_targets = list(allocate_parameters(build, model))
        self.layers = [
            attention.PagedLayer(self.step, index, fused=build.fused) for index in range(len(modules))
        ]
        for module, layer in zip(modules, self.layers, strict=True):
            setattr(module, attention.ATTRIBUTE, layer)
            if self.defers_rotation:
                defer_rotation(module, layer)
        self.ignored: Sequence[re.Pattern[str]] = [
            re.compile(pattern)
            for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        ]
        """Patterns of the names of checkpoint tensors that the model does not need."""
        head = model.get_output_embeddings()
        setattr(model, model.base_model_prefix, GivenStates())
        self.deferred_adds = DeferredAdds(self.base) if replace else None
        """Additions to the residual stream that are fused with norms; None if nothing is replaced."""
        self.head = head if isinstance(head, HeadModule) else None

    def keep_rotation(self) -> None:
        """Let the model apply RoPE itself again."""
        self.defers_rotation = False
        for module in self.attention_modules:
            restore_rotation(module)

    @property
    def replacements(self) -> Iterator[Replacement]:
        """Mizzen's modules in the model."""
        for part in (self.base, self.causal):
            yield from (module for module in part.modules() if isinstance(module, Replacement))

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of all checkpoint tensors."""
        for module in self.replacements:
            yield from module.targets()
        yield from self.kept_targets

    def finish(self) -> None:
        """Prepare the loaded weights for the kernels; must be called once, before the first step."""
        for module in self.replacements:
            module.finish()

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states unchanged: the decoder has normalised them already."""
        return hidden

    def attention_sinks(self) -> torch.Tensor | None:
        """Return None: models with attention sinks are refused."""
        return None

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: StepAttention,
        rows: torch.Tensor | None = None,
        *,
        rotary: torch.Tensor | None = None,
        images: BatchImages | None = None,
    ) -> torch.Tensor:
        """Run the decoder over a batch of tokens; the arguments are those of `DecoderModel.hidden`.

        Returns:
            The decoder's normalised output [tokens or rows, hidden].

        Raises:
            ValueError: `rotary` or `images` are given, which only native models support.
        """
        if rotary is not None or images is not None:
            raise ValueError(f"{self.config.architecture} runs in Transformers, where it takes no images")
        self.step.begin(attend)
        try:
            out = self.base(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        finally:
            self.step.end()
            if self.deferred_adds is not None:
                self.deferred_adds.pending.drop()
        hidden = out.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [rows, vocab] for hidden states [rows, hidden], in `out` if given."""
        if self.head is not None:
            self.head.out = out
        logits = self.causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        if out is None:
            return logits.to(self.dtype)
        return out if logits.data_ptr() == out.data_ptr() else out.copy_(logits)

    def without_fused_swiglu(self) -> AbstractContextManager[None]:
        """Disable the fused gate-up SwiGLU kernel of prefills; see `DecoderModel.without_fused_swiglu`."""
        return without_prefill_fusion(
            [module.gate_up.method for module in self.replacements if isinstance(module, GatedMLP)]
        )

    def kernel_specs(self, batch_sizes: Collection[int]) -> set[KernelSpec]:
        """Return the specs of the GEMM kernels for these batch sizes."""
        specs: set[KernelSpec] = set()
        for method, activation in self.distinct_methods():
            specs |= method.kernel_specs(batch_sizes, activation=activation)
        return specs if self.head is None else specs | self.head.head.kernel_specs(batch_sizes)

    def distinct_methods(self) -> Iterator[tuple[LinearMethod, GateActivation | None]]:
        """Yield one linear method of each shape, with the activation of the gate if it has one."""
        seen: set[tuple[object, ...]] = set()
        for module in self.replacements:
            gated = [(module.gate_up.method, module.activation)] if isinstance(module, GatedMLP) else []
            for method, activation in [*gated, *((method, None) for method in module.methods())]:
                spec = getattr(method, "spec", None)
                key = (
                    (spec.rows, spec.columns, spec.bias, spec.kind, activation is None) if spec else (method,)
                )
                if key not in seen:
                    seen.add(key)
                    yield method, activation
