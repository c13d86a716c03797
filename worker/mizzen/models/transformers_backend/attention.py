# SPDX-License-Identifier: Apache-2.0
"""Attention function for Transformers' attention interface, which runs Mizzen's paged attention.

The attention modules of a model call it with the queries, keys and values of the step's tokens, which form
one row of a batch: [1, heads, tokens, head_dim]. `PagedLayer` connects one module to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from mizzen.attention.base import StepAttention
from mizzen.layers.rope import rotate

IMPLEMENTATION = "mizzen"
"""Name of the attention function in Transformers. There is no mask function of this name, so that models
make no masks."""
ATTRIBUTE = "mizzen_attention"
"""Attribute of a Transformers module that holds its `AttentionLayer`."""


class AttentionInputs(NamedTuple):
    """Arguments of an attention call of a Transformers module."""

    module: torch.nn.Module
    query: torch.Tensor
    """Queries [1, heads, tokens, head_dim]."""
    key: torch.Tensor
    """Keys [1, kv_heads, tokens, head_dim]."""
    value: torch.Tensor
    """Values [1, kv_heads, tokens, head_dim]."""
    mask: torch.Tensor | None
    options: dict[str, Any]
    """Other keyword arguments."""


AttentionLayer = Callable[[AttentionInputs], torch.Tensor]
"""Receiver of attention calls; returns the attention [1, tokens, heads, head_dim]."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, as Transformers' attention interface requires; there are no attention weights to return."""
    layer: AttentionLayer = getattr(module, ATTRIBUTE)
    return layer(AttentionInputs(module, query, key, value, attention_mask, options)), None


def register() -> None:
    """Make `attend` known to Transformers; a second call changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, attend)


class Step:
    """Attention of the step that a model runs at the moment; shared by all layers of the model."""

    def __init__(self) -> None:
        self.attend: Any = None
        """`StepAttention` of the current step."""
        self.compares_halves = False
        """Whether to check that cosines and sines have two equal halves; reads the result from the device."""
        self.halves_differ = False
        """Whether a check has found halves that differ."""
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None
        self._halves: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, attend: Any) -> None:
        """Start a step."""
        self.attend, self._angles, self._halves = attend, None, None

    def end(self) -> None:
        """End the step, and drop its tensors."""
        self.begin(None)

    def half_angles(
        self, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first halves of cosines and sines [1, tokens, d] as tensors [tokens, 1, d / 2].

        Layers of a step usually pass the same tensors, so the last result is kept.
        """
        if self._angles is None or self._halves is None or self._angles[0] is not cos:
            half = cos.shape[-1] // 2
            if self.compares_halves:
                equal = (torch.equal(x[..., :half], x[..., half:]) for x in (cos, sin))
                self.halves_differ |= not all(equal)
            cosines, sines = (x[0, :, None, :half].to(dtype).contiguous() for x in (cos, sin))
            self._angles, self._halves = (cos, sin), (cosines, sines)
        return self._halves


class PagedLayer:
    """Paged attention of one layer, for the attention module that calls it."""

    def __init__(self, step: Step, layer: int, *, fused: bool) -> None:
        """Create the layer.

        Args:
            step: Holder of the current step's attention.
            layer: Number of the layer in the KV cache.
            fused: Whether the kernels of `mizzen.kernels` may be used.
        """
        self.step = step
        self.layer = layer
        self.fused = fused
        self.pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """Queries, keys, cosines and sines of a rotation that this layer has yet to apply."""

    def defer_rotation(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a rotation until the attention is called; return q and k unchanged.

        q and k are [1, heads, tokens, d]; cos and sin are [1, tokens, d], with two equal halves.
        """
        self.pending = (q, k, cos, sin)
        return q, k

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """Store keys and values, and attend with queries; return the attention [1, tokens, heads, d].

        Raises:
            RuntimeError: the module made a mask, or changed tensors whose rotation is deferred. Both are
                refused when the model is inspected.
        """
        query, key, name = inputs.query, inputs.key, type(inputs.module).__name__
        if inputs.mask is not None:
            raise RuntimeError(f"{name} passes an attention mask, which it did not before")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, inputs.value))
        pending, self.pending = self.pending, None
        if pending is None:
            return self.attend_rotated(q, k, v)[None]
        if pending[0] is not query or pending[1] is not key:
            raise RuntimeError(f"{name} changes queries or keys after their rotation")
        _, _, cos, sin = pending
        if self.fused and isinstance(self.step.attend, StepAttention):
            return self.attend_fused(merge_heads(q, k, v), q.shape, cos, sin)[None]
        cosines, sines = self.step.half_angles(cos, sin, q.dtype)
        return self.attend_rotated(rotate(q, cosines, sines), rotate(k, cosines, sines), v)[None]

    def attend_rotated(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend with queries [tokens, heads, d] and keys that are rotated already."""
        return self.step.attend(self.layer, q.contiguous() if self.fused else q, k, v)

    def attend_fused(
        self, qkv: torch.Tensor, shape: torch.Size, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Rotate, store and attend with fused kernels.

        Args:
            qkv: Queries, keys and values of all heads [tokens, (heads + 2 * kv_heads) * d], contiguous.
            shape: Shape [tokens, heads, d] of the queries and of the result.
            cos: Cosines [1, tokens, d].
            sin: Sines [1, tokens, d].
        """
        from mizzen.kernels.attention.qk_norm_rope import qk_norm_rope

        attend: StepAttention = self.step.attend
        cosines, sines = self.step.half_angles(cos, sin, torch.float32)
        if attend.fused_decode is not None:
            out = qkv.new_empty(shape)
            attend.fused_decode(self.layer, qkv, None, 0.0, cosines, sines, out)
            return out
        keys, values = attend.kv.keys[self.layer], attend.kv.values[self.layer]
        q = qk_norm_rope(qkv, None, 0.0, cosines, sines, attend.slot_mapping, keys, values)
        return attend.attend_cached(self.layer, q, None, None)


def merge_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return queries, keys and values [tokens, heads, d] as one tensor [tokens, all heads * d].

    If they are views of such a tensor, as the merged projection makes them, nothing is copied.
    """
    tokens, heads, size = q.shape
    total = (heads + 2 * k.shape[1]) * size
    row = q.element_size() * size
    adjacent = (
        all(has_strides(x, total, size) for x in (q, k, v))
        and k.data_ptr() == q.data_ptr() + heads * row
        and v.data_ptr() == k.data_ptr() + k.shape[1] * row
        and q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    )
    if adjacent:
        return q.as_strided((tokens, total), (total, 1))
    return torch.cat((q, k, v), dim=1).view(tokens, total)


def has_strides(x: torch.Tensor, token: int, head: int) -> bool:
    """Return whether x [tokens, heads, d] has these strides; those of dimensions of size 1 do not matter."""
    tokens, heads, _ = x.shape
    strides = x.stride()
    return (tokens == 1 or strides[0] == token) and (heads == 1 or strides[1] == head) and strides[2] == 1
