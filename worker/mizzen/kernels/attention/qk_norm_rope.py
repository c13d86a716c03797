# SPDX-License-Identifier: Apache-2.0
"""QK norm, RoPE and the KV cache write, fused into one kernel between projection and attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.launch import pdl_launch_options

HEADS_A_PROGRAM = 8


@triton.jit
def _prepare_heads_kernel(
    qkv, q_weight, k_weight, cos, sin, slot_mapping, q_out, keys, values, epsilon,
    Q: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    KEEP_KEYS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    size: tl.constexpr = 2 * HALF
    inside = (column < HALF) & (head < Q + 2 * KV)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = qkv + (token * (Q + 2 * KV) + head) * size + column
    left = tl.load(source, inside, 0.0).to(tl.float32)
    right = tl.load(source + HALF, inside, 0.0).to(tl.float32)
    is_q, is_k = head < Q, (head >= Q) & (head < Q + KV)

    # Values are neither normalised nor rotated; they are stored unchanged.
    cell = tl.load(slot_mapping + token)
    v_into = values + (cell * KV + head - Q - KV) * size + column
    is_v = inside & (head >= Q + KV)
    tl.store(v_into, left.to(values.dtype.element_ty), is_v)
    tl.store(v_into + HALF, right.to(values.dtype.element_ty), is_v)

    if NORM:
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / size + epsilon)[:, None]
        half = column < HALF
        q_left, q_right = tl.load(q_weight + column, half, 0.0), tl.load(q_weight + HALF + column, half, 0.0)
        k_left, k_right = tl.load(k_weight + column, half, 0.0), tl.load(k_weight + HALF + column, half, 0.0)
        left = left * scale * tl.where(is_q, q_left, k_left).to(tl.float32)
        right = right * scale * tl.where(is_q, q_right, k_right).to(tl.float32)
    c = tl.load(cos + token * HALF + column, column < HALF, 0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + column, column < HALF, 0.0).to(tl.float32)
    first, second = left * c - right * s, right * c + left * s
    q_into = q_out + (token * Q + head) * size + column
    tl.store(q_into, first.to(q_out.dtype.element_ty), inside & is_q)
    tl.store(q_into + HALF, second.to(q_out.dtype.element_ty), inside & is_q)
    k_into = keys + (cell * KV + head - Q) * size + column
    tl.store(k_into, first.to(keys.dtype.element_ty), inside & is_k)
    tl.store(k_into + HALF, second.to(keys.dtype.element_ty), inside & is_k)
    if KEEP_KEYS:
        tl.debug_barrier()  # several threads may have loaded the same keys
        tl.store(source, first.to(qkv.dtype.element_ty), inside & is_k)
        tl.store(source + HALF, second.to(qkv.dtype.element_ty), inside & is_k)


def qk_norm_rope(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    keep_keys: bool = False,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, store keys and values, and return the queries.

    Args:
        qkv: QKV projection [tokens, (heads + 2 * kv_heads) * head_dim], contiguous.
        norms: RMSNorm weights [head_dim] of queries and keys; None for a model without QK norm.
        epsilon: Epsilon of the norms.
        cos: Cosines [tokens, 1, head_dim / 2], in half-split layout.
        sin: Sines, of the same shape.
        slot_mapping: KV slots of the tokens, int64 [tokens].
        keys: Key cache of one layer, [KV slots, kv_heads, head_dim], contiguous.
        values: Value cache of the layer, of the same shape.
        keep_keys: Whether the keys also replace those in `qkv`.

    Returns:
        The queries [tokens, heads, head_dim], with the dtype of `qkv`.
    """
    tokens, (_, kv_heads, size) = len(qkv), keys.shape
    heads = qkv.shape[1] // size - 2 * kv_heads
    q = torch.empty((tokens, heads, size), dtype=qkv.dtype, device=qkv.device)
    total = heads + 2 * kv_heads
    together = min(HEADS_A_PROGRAM, triton.next_power_of_2(total))
    q_weight, k_weight = (qkv, qkv) if norms is None else norms
    _prepare_heads_kernel[(tokens, triton.cdiv(total, together))](
        qkv, q_weight, k_weight, cos, sin, slot_mapping, q, keys, values, epsilon,
        Q=heads, KV=kv_heads, HALF=size // 2, NORM=norms is not None,
        KEEP_KEYS=keep_keys, HEADS=together, BLOCK=triton.next_power_of_2(size // 2), num_warps=2,
        **pdl_launch_options(q),
    )  # fmt: skip
    return q
