# SPDX-License-Identifier: Apache-2.0
"""Fuses the additions to the residual stream with the norms that follow them.

It applies to models whose decoder layers compute h += attention(norm(h)); h += mlp(norm(h)). A layer then
returns the residual stream without its last output; the next layer, or the final norm, adds the output.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn

from mizzen.models.transformers_backend.linears import NormModule
from mizzen.models.transformers_backend.recognition import equal, random, succeeds

INPUT_NORM, ATTENTION, MIDDLE_NORM, MLP = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"
OPTIONS = ("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings")
"""Keyword arguments that decoders pass to their layers."""


class PendingOutput:
    """Output of a layer that is still to be added to the residual stream; shared by the layers of a model."""

    def __init__(self) -> None:
        self.residual: torch.Tensor | None = None
        self.output: torch.Tensor | None = None

    def defer(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Keep `output` for the next norm; return `residual`. Both are [1, tokens, hidden]."""
        self.residual, self.output = residual, output
        return residual

    def drop(self) -> None:
        """Forget the output."""
        self.residual = self.output = None

    def normalise(self, norm: NormModule, residual: torch.Tensor) -> torch.Tensor:
        """Add the kept output, if there is one, to the residual stream in place; return the normalised sum.

        Raises:
            RuntimeError: the output belongs to another tensor.
        """
        kept, output = self.residual, self.output
        self.drop()
        if output is None:
            return norm(residual)
        if kept is not residual:
            raise RuntimeError("the model changes the residual stream between its layers")
        return add_and_normalise(norm, output, residual)


def add_and_normalise(norm: NormModule, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Add x to the residual stream in place; return the normalised sum. All are [1, tokens, hidden]."""
    size = residual.shape[-1]
    rows = x.reshape(-1, size).contiguous()
    return norm.norm.add(rows, residual.view(-1, size)).view(residual.shape)


class LayerStub(nn.Module):
    """Replaces a module of a decoder layer; multiplies its input by a factor, and adds the factor."""

    def __init__(self, factor: float, *, returns_weights: bool = False) -> None:
        super().__init__()
        self.factor = factor
        self.returns_weights = returns_weights
        self.options: dict[str, Any] = {}

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        """Return the result; with `returns_weights`, also None in place of attention weights."""
        self.options = options
        out = hidden_states * self.factor + self.factor
        return (out, None) if self.returns_weights else out


def is_plain_layer(layer: Any) -> bool:
    """Return whether a decoder layer computes h += attention(norm(h)); h += mlp(norm(h)), and nothing else.

    Its modules are replaced by simple functions, and the result must equal the formula.
    """
    stubs = {
        INPUT_NORM: LayerStub(0.5),
        ATTENTION: LayerStub(0.75, returns_weights=True),
        MIDDLE_NORM: LayerStub(1.25),
        MLP: LayerStub(-0.5),
    }
    if set(layer._modules) != set(stubs) or layer._parameters or layer._buffers:
        return False
    twin = copy.copy(layer)
    twin._modules = dict(stubs)
    hidden, options = random(1, 3, 4), {name: object() for name in OPTIONS}
    actual = succeeds(lambda: twin(hidden.clone(), **options))
    middle = hidden + stubs[ATTENTION](stubs[INPUT_NORM](hidden), **stubs[ATTENTION].options)[0]
    received = stubs[ATTENTION].options
    passed = set(received) == set(options) and all(received[name] is options[name] for name in options)
    return passed and equal(actual, middle + stubs[MLP](stubs[MIDDLE_NORM](middle)))


class DeferredAdds:
    """The fused additions of one model, which can be turned off."""

    def __init__(self, base: Any) -> None:
        """Fuse the additions of a decoder, if all its layers are plain and its norms are Mizzen's."""
        self.pending = PendingOutput()
        layers = list(getattr(base, "layers", ()))
        norm: Any = getattr(base, "norm", None)
        self.modules: list[Any] = [*layers, norm]
        self.active = (
            bool(layers)
            and isinstance(norm, NormModule)
            and all(
                isinstance(getattr(layer, name, None), NormModule)
                for layer in layers
                for name in (INPUT_NORM, MIDDLE_NORM)
            )
            and all(is_plain_layer(layer) for layer in layers)
        )
        if self.active:
            for layer in layers:
                layer.forward = types.MethodType(self.layer_forward(), layer)
            norm.forward = types.MethodType(self.norm_forward(), norm)

    def layer_forward(self) -> Any:
        """Return the forward method of a decoder layer."""
        pending = self.pending

        def forward(layer: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
            inputs = pending.normalise(layer.input_layernorm, hidden_states)
            attended, _ = layer.self_attn(hidden_states=inputs, **options)
            inputs = add_and_normalise(layer.post_attention_layernorm, attended, hidden_states)
            return pending.defer(hidden_states, layer.mlp(inputs))

        return forward

    def norm_forward(self) -> Any:
        """Return the forward method of the final norm."""
        pending = self.pending

        def forward(norm: NormModule, x: torch.Tensor) -> torch.Tensor:
            kept, output = pending.residual, pending.output
            pending.drop()
            if output is None or kept is not x:
                raise RuntimeError("the model changes the residual stream before its last norm")
            return add_and_normalise(norm, output, x)

        return forward

    def turn_off(self) -> None:
        """Restore the forward methods that the classes of the modules define."""
        self.active = False
        self.pending.drop()
        for module in self.modules:
            if module is not None:
                module.__dict__.pop("forward", None)
