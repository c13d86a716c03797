# SPDX-License-Identifier: Apache-2.0
"""Scales output rows of weights in the fragment layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from mizzen.kernels.gemm.fragments import (
    OCTET_ROWS,
    STRIP_ROWS,
    PackedWeight,
    ScaleLayout,
    expand_scales,
    find_source_rows,
)
from mizzen.layers.quantized.canonical import narrow_scales


def scale_packed_rows(packed: PackedWeight, rows: slice, factor: float) -> PackedWeight:
    """Return the weight with output rows multiplied by a power of two; the codes are shared.

    Scales keep their dtype if that represents the products exactly, and otherwise become float32.
    """
    source = find_source_rows(packed.rows, swiglu=packed.swiglu)
    chosen = torch.zeros(packed.rows, dtype=torch.bool)
    chosen[rows] = True
    scaled = (chosen[source.clamp(min=0)] & (source >= 0)).to(packed.scales.device)
    factors = torch.where(scaled, factor, 1.0)
    octets = factors.view(packed.strips, STRIP_ROWS // OCTET_ROWS, OCTET_ROWS)
    match packed.scale_layout:
        case ScaleLayout.ROW:
            return replace(packed, scales=packed.scales * factors)
        case ScaleLayout.OCTET if bool((octets == octets[..., :1]).all()):
            return replace(packed, scales=packed.scales * octets[:, None, :, 0])
        case ScaleLayout.OCTET:
            scales = expand_scales(packed).view(*octets.shape, packed.groups) * octets[..., None]
            scales = scales.permute(0, 3, 2, 1).reshape(packed.strips, packed.groups, STRIP_ROWS)
            return replace(packed, scales=scales, scale_layout=ScaleLayout.GROUP)
        case ScaleLayout.GROUP:
            scales = packed.scales.float() * octets.transpose(1, 2).reshape(packed.strips, 1, STRIP_ROWS)
            return replace(packed, scales=narrow_scales(scales, packed.scales.dtype))
