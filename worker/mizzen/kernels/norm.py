# SPDX-License-Identifier: Apache-2.0
"""RMSNorm (arXiv 1910.07467), alone or fused with the residual addition before it, and LayerNorm (arXiv
1607.06450) fused with it or with a bias before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.launch import pdl_launch_options


@triton.jit
def load_sum(
    x, residual, row, x_stride, size, columns, inside, ADD: tl.constexpr, STORE: tl.constexpr = True
):
    """Return x of a token; with `ADD`, add it to `residual`, and return the sum in the dtype of `residual`.

    With `STORE`, `residual` becomes the sum.
    """
    value = tl.load(x + row * x_stride + columns, inside, 0.0)
    if ADD:
        before = tl.load(residual + row * size + columns, inside, 0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        if STORE:
            tl.store(residual + row * size + columns, value, inside)
    return value


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    out_stride,
    size,
    epsilon,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = load_sum(x, residual, row, x_stride, size, columns, inside, ADD)
    value = value.to(tl.float32)
    mean = tl.sum(value * value, 0) / size
    value = value * tl.rsqrt(mean + epsilon) * scale
    tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device) if out is None else out
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        out.stride(0),
        size,
        epsilon,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **pdl_launch_options(x),
    )
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x [rows, size] with its rows RMS-normalised and scaled by `weight` [size], in `out` if given.

    The rows of x and `out` may be strided, and `out` may be x. Both have the model's dtype; the weight may
    also be float32. Sums are in float32.
    """
    return _launch(x, None, weight, epsilon, out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add x to `residual` in place, and return the RMS-normalised sum scaled by `weight` [size].

    x, `residual` (contiguous) and the result are [rows, size], in the model's dtype; the weight may also be
    float32. Sums are in float32.
    """
    return _launch(x, residual, weight, epsilon)


@triton.jit
def _layer_norm_kernel(
    x,
    residual,
    shift,
    weight,
    bias,
    out,
    size,
    epsilon,
    ADD: tl.constexpr,
    SHIFT: tl.constexpr,
    BIAS: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = load_sum(x, residual, row, size, size, columns, inside, ADD, STORE).to(tl.float32)
    if SHIFT:
        value += tl.load(shift + columns, inside, 0.0).to(tl.float32)
    mean = tl.sum(value, 0) / size
    value = tl.where(inside, value - mean, 0.0)
    variance = tl.sum(value * value, 0) / size
    value = value * tl.rsqrt(variance + epsilon) * scale
    if BIAS:
        value += tl.load(bias + columns, inside, 0.0).to(tl.float32)
    tl.store(out + row * size + columns, value.to(out.dtype.element_ty), inside)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    keeps_sum: bool = True,
) -> torch.Tensor:
    """Return the sum of x and `residual`, layer-normalised, scaled by `weight` [size], plus `bias` [size].

    x, `residual` and the result are [rows, size], contiguous, in the model's dtype; weight and bias may also
    be float32. Sums are in float32. With `keeps_sum`, `residual` becomes the sum; else it is not changed.
    """
    return _launch_layer_norm(x, residual, None, weight, bias, epsilon, keeps_sum)


def shifted_layer_norm(
    x: torch.Tensor,
    shift: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Return x plus `shift` [size], layer-normalised, scaled by `weight` [size], plus `bias` [size].

    x and the result are [rows, size], contiguous, in the model's dtype; weight and biases may also be
    float32. Sums are in float32.
    """
    return _launch_layer_norm(x, None, shift, weight, bias, epsilon, False)


def _launch_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    shift: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    keeps_sum: bool,
) -> torch.Tensor:
    rows, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _layer_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight if shift is None else shift,
        weight,
        weight if bias is None else bias,
        out,
        size,
        epsilon,
        ADD=residual is not None,
        SHIFT=shift is not None,
        BIAS=bias is not None,
        STORE=keeps_sum,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **pdl_launch_options(x),
    )
    return out
