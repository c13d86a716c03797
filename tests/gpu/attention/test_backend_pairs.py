# SPDX-License-Identifier: Apache-2.0
"""In one batch, any decode backend works with any prefill backend.

The default pair is tested with each head dimension, and with various group and page sizes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_kit import check_mixed, make_kv
from flashinfer_kit import BF16, need
from hopper import WITH_FA3

from mizzen.attention.base import Geometry
from mizzen.attention.registry import make_attention
from mizzen.engine.config import ATTENTION_DECODE, ATTENTION_PREFILL

pytestmark = WITH_FA3
DECODES = [name for name in ATTENTION_DECODE if name not in ("auto", "cpu")]
PROMPTS = [name for name in ATTENTION_PREFILL if name not in ("auto", "cpu")]


def check(decode: str, prefill: str, geometry: Geometry, page: int) -> None:
    for name in {decode, prefill}:
        if name.startswith("flashinfer"):
            pytest.importorskip("flashinfer")
            for window in geometry.windows:
                need("fa3" if name.endswith("fa3") else "fa2", geometry.head_dim, window is not None)
    kv, pages = make_kv(geometry, page, BF16)
    if geometry.has_sinks:
        kv = replace(kv, sinks=torch.randn(len(geometry.windows), geometry.heads, device=kv.device).to(BF16))
    attention = make_attention(geometry, kv, prefill=prefill, decode=decode)
    assert attention.backend_names == (decode, prefill)
    check_mixed(attention.decode, geometry, kv, pages, BF16, prefill=attention.prefill, times=2)


@pytest.mark.parametrize("prefill", PROMPTS)
@pytest.mark.parametrize("decode", DECODES)
def test_any_pair_of_backends_equals_the_reference(decode: str, prefill: str) -> None:
    check(decode, prefill, Geometry(heads=8, kv_heads=2, head_dim=128, windows=(None,)), 16)


@pytest.mark.parametrize("prefill", ["fa3", "reference"])
@pytest.mark.parametrize("decode", ["split", "fa3", "reference"])
def test_any_pair_of_backends_with_attention_sinks_equals_the_reference(decode: str, prefill: str) -> None:
    geometry = Geometry(heads=16, kv_heads=2, head_dim=64, windows=(128, None), has_sinks=True)
    check(decode, prefill, geometry, 16)


@pytest.mark.parametrize(
    ("groups", "page"), [*((groups, 16) for groups in range(1, 9)), (4, 1), (4, 24), (4, 64)]
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_default_pair_equals_the_reference_in_every_shape(head_dim: int, groups: int, page: int) -> None:
    geometry = Geometry(heads=2 * groups, kv_heads=2, head_dim=head_dim, windows=(None, 100))
    check("split", "fa3", geometry, page)
