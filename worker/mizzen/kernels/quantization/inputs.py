# SPDX-License-Identifier: Apache-2.0
"""Quantization of the inputs of W8A8 products to E4M3 or INT8, alone or fused behind RMSNorm or SwiGLU.

A scale is the largest absolute value that it covers, at least 1e-10, divided by the largest code (448 or
127). It covers a token, or a token and 128 columns, or it is static. Codes are rounded to nearest; larger
values saturate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mizzen.kernels.gemm.w8a8_swap_ab import QuantizedInputs
from mizzen.kernels.launch import pdl_launch_options
from mizzen.kernels.norm import load_sum

GROUP_COLUMNS = 128
"""Columns that share a scale if not all columns of a token do."""
TOKEN_MULTIPLE = 4
"""The tokens of grouped scales, and the rows of their values in memory, are padded to a multiple of this."""
MAX_CODES = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest code of each type, by which the largest absolute value is divided."""
MAX_FEW_TOKENS = 132
"""Largest number of tokens whose programs all run at once, one for each SM of a Hopper GPU."""
CHUNK_COLUMNS = 1024
"""Columns of a block of the kernel for grouped and static scales, whose parts are independent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFormat:
    """Quantization of the inputs of a product."""

    dtype: torch.dtype
    """float8_e4m3fn or int8."""
    grouped: bool = False
    """Whether each 128 columns of a token have their own scale."""
    static_scale: torch.Tensor | None = None
    """Scale of all inputs, float32 [1]; None if scales are computed from the inputs."""
    upper_bound: float = 0.0
    """Largest absolute value from which a scale is computed; 0 for none."""


@triton.jit
def _round_codes(value, INT8: tl.constexpr):
    """Return the codes of scaled values; beyond the largest code they saturate."""
    if INT8:
        # Adding and subtracting 1.5 * 2**23 rounds to nearest, ties to even.
        value = tl.minimum(tl.maximum(value, -128.0), 127.0)
        codes = ((value + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        codes = tl.minimum(tl.maximum(value, -448.0), 448.0).to(tl.float8e4nv)
    return codes


@triton.jit
def _add_and_max(sum_a, max_a, sum_b, max_b):
    """Combine a sum and a maximum of two parts."""
    return sum_a + sum_b, tl.maximum(max_a, max_b)


@triton.jit
def _store_quantized(
    value,
    amax,
    columns,
    inside,
    row,
    out,
    scales,
    scale_stride,
    size,
    upper_bound,
    MAX_CODE: tl.constexpr,
    INT8: tl.constexpr,
    GROUPED: tl.constexpr,
    STATIC: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize values [BLOCK] (float32, 0 outside) of a token, and store their codes and scales.

    `amax` is the largest absolute value, which only a scale of the whole token needs.
    """
    if STATIC:
        codes = _round_codes(value * (1.0 / tl.load(scales)), INT8)
    elif GROUPED:
        parts = tl.reshape(tl.abs(value), [BLOCK // 128, 128])
        largest = tl.maximum(tl.max(parts, 1), 1e-10)
        if BOUNDED:
            largest = tl.minimum(largest, upper_bound)
        scale = tl.math.div_rn(largest, MAX_CODE)
        scaled = tl.reshape(value, [BLOCK // 128, 128]) * tl.expand_dims(1.0 / scale, 1)
        codes = _round_codes(tl.reshape(scaled, [BLOCK]), INT8)
        group = tl.program_id(1) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
        tl.store(scales + group * scale_stride + row, scale, group * 128 < size)
    else:
        amax = tl.maximum(amax, 1e-10)
        if BOUNDED:
            amax = tl.minimum(amax, upper_bound)
        scale = tl.math.div_rn(amax, MAX_CODE)
        codes = _round_codes(value * (1.0 / scale), INT8)
        tl.store(scales + row, scale)
    tl.store(out + row * size + columns, codes, inside)


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_kernel(
    x,
    x_stride,
    out,
    scales,
    scale_stride,
    size,
    upper_bound,
    SWIGLU: tl.constexpr,
    MAX_CODE: tl.constexpr,
    INT8: tl.constexpr,
    GROUPED: tl.constexpr,
    STATIC: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(x + row * x_stride + size + columns, inside, 0.0).to(tl.float32)
        # Rounded as by the activation alone, so that the fused kernel gives the same codes.
        value = (value / (1 + tl.exp(-value)) * up).to(x.dtype.element_ty).to(tl.float32)
    _store_quantized(
        value, tl.max(tl.abs(value), 0), columns, inside, row, out, scales,
        scale_stride, size, upper_bound, MAX_CODE, INT8, GROUPED, STATIC, BOUNDED, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale_stride"])
def _norm_quantize_kernel(
    x,
    residual,
    weight,
    x_stride,
    epsilon,
    out,
    scales,
    scale_stride,
    size,
    upper_bound,
    ADD: tl.constexpr,
    MAX_CODE: tl.constexpr,
    INT8: tl.constexpr,
    GROUPED: tl.constexpr,
    STATIC: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    factor = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = load_sum(x, residual, row, x_stride, size, columns, inside, ADD)
    dtype: tl.constexpr = value.dtype
    value = value.to(tl.float32)
    # One reduction for both, because each costs a decode step time.
    total, amax = tl.reduce((value * value, tl.abs(value * factor)), 0, _add_and_max)
    inverse_rms = tl.rsqrt(total / size + epsilon)
    # Rounded as by the norm alone, so that the fused kernel gives the same codes.
    value = (value * inverse_rms * factor).to(dtype).to(tl.float32)
    _store_quantized(
        value, (amax * inverse_rms).to(dtype).to(tl.float32), columns, inside, row, out, scales,
        scale_stride, size, upper_bound, MAX_CODE, INT8, GROUPED, STATIC, BOUNDED, BLOCK,
    )  # fmt: skip


def allocate_outputs(rows: int, columns: int, form: InputFormat, device: torch.device) -> QuantizedInputs:
    """Allocate quantized inputs of `rows` tokens, without their content."""
    if not form.grouped:
        values = torch.empty((rows, columns), dtype=form.dtype, device=device)
        if form.static_scale is not None:
            return QuantizedInputs(values=values, scales=form.static_scale)
        return QuantizedInputs(values=values, scales=torch.empty(rows, device=device))
    padded = -(-rows // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    values = torch.empty((padded, columns), dtype=form.dtype, device=device)[:rows]
    groups = -(-columns // GROUP_COLUMNS)
    return QuantizedInputs(values=values, scales=torch.empty((groups, padded), device=device))


def kernel_options(form: InputFormat, block: int, x: torch.Tensor) -> dict[str, object]:
    """Return the compile-time options of a kernel whose programs quantize `block` columns of a token.

    Few tokens get more warps, because then the time of a single program counts.
    """
    elements = 512 if len(x) > MAX_FEW_TOKENS else 256
    return {
        "MAX_CODE": MAX_CODES[form.dtype],
        "INT8": form.dtype == torch.int8,
        "GROUPED": form.grouped,
        "STATIC": form.static_scale is not None,
        "BOUNDED": form.upper_bound > 0,
        "BLOCK": block,
        "num_warps": min(16, max(1, block // elements)),
        **pdl_launch_options(x),
    }


def select_block(size: int, form: InputFormat) -> int:
    """Return the columns of a program: all `size` if a token has one computed scale, else a part."""
    divisible = form.grouped or form.static_scale is not None
    return CHUNK_COLUMNS if divisible else max(128, triton.next_power_of_2(size))


def quantize_inputs(x: torch.Tensor, form: InputFormat, *, swiglu: bool = False) -> QuantizedInputs:
    """Quantize x [tokens, columns], whose rows may be strided.

    With `swiglu`, x holds gate and up, and silu(gate) * up [tokens, columns / 2] is quantized. The result
    equals that of `mizzen.kernels.swiglu.gate_mul` followed by quantization alone.
    """
    rows, size = x.shape[0], x.shape[1] // (1 + swiglu)
    out = allocate_outputs(rows, size, form, x.device)
    block = select_block(size, form)
    _quantize_kernel[(rows, triton.cdiv(size, block))](
        x,
        x.stride(0),
        out.values,
        out.scales,
        out.scales.stride(0),
        size,
        form.upper_bound,
        SWIGLU=swiglu,
        **kernel_options(form, block, x),
    )
    return out


def quantize_after_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, form: InputFormat
) -> QuantizedInputs:
    """Quantize the RMS-normalised x [tokens, size], scaled by `weight` [size].

    With a `residual` [tokens, size] (contiguous), x is first added to it in place, and the sum is normalised.
    The result equals that of `mizzen.kernels.norm` followed by `quantize_inputs`.
    """
    rows, size = x.shape
    out = allocate_outputs(rows, size, form, x.device)
    block = max(128, triton.next_power_of_2(size))
    _norm_quantize_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        x.stride(0),
        epsilon,
        out.values,
        out.scales,
        out.scales.stride(0),
        size,
        form.upper_bound,
        ADD=residual is not None,
        **kernel_options(form, block, x),
    )
    return out
