# SPDX-License-Identifier: Apache-2.0
"""Attention backends by name, and the selection of the default backend."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mizzen.attention.base import (
    AttentionBackend,
    Geometry,
    KVFormat,
    MixedAttention,
    PagedKV,
)
from mizzen.attention.reference import ReferenceAttention
from mizzen.attention.requirements import unsupported_error

log = logging.getLogger(__name__)

BackendFactory = Callable[[Geometry, PagedKV], AttentionBackend]
SupportCheck = Callable[[Geometry, KVFormat], str | None]
"""Function that returns the reason why a backend does not support a KV cache or model; None if it does."""


def make_reference(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the reference backend, which runs on any device."""
    return ReferenceAttention(geometry, kv)


def cpu_unsupported_reason(geometry: Geometry, kv: KVFormat) -> str | None:
    """Return the reason why the CPU backend does not support a KV cache; None if it does."""
    return None if kv.device.type == "cpu" else f"it needs --device cpu, not {kv.device.type}"


def make_cpu(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the fast backend for the CPU.

    Raises:
        ValueError: the KV cache is on another device.
    """
    from mizzen.attention.cpu import CpuAttention

    if reason := cpu_unsupported_reason(geometry, kv):
        raise unsupported_error("attention cpu", reason)
    return CpuAttention(geometry, kv)


def make_fa3(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the FlashAttention 3 backend for Hopper."""
    from mizzen.attention.flash_attention3 import FlashAttention3

    return FlashAttention3(geometry, kv)


def make_flash_decode(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the backend with Mizzen's own split-KV decode kernels."""
    from mizzen.attention.flash_decode import FlashDecodeAttention

    return FlashDecodeAttention(geometry, kv)


def make_flashinfer(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make FlashInfer's backend with the kernels for Ampere and later."""
    from mizzen.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(geometry, kv, "fa2")


def make_flashinfer_fa3(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make FlashInfer's backend with the kernels for Hopper."""
    from mizzen.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(geometry, kv, "fa3")


FACTORIES: dict[str, BackendFactory] = {
    "cpu": make_cpu,
    "fa3": make_fa3,
    "flashinfer": make_flashinfer,
    "flashinfer-fa3": make_flashinfer_fa3,
    "reference": make_reference,
    "split": make_flash_decode,
}
"""Backend factories by name; each imports its backend only when it is called, because imports are slow."""


def support_checks() -> dict[str, SupportCheck]:
    """Return the support check of each backend by name."""
    from mizzen.attention import flash_attention3, flash_decode, flashinfer

    return {
        "cpu": cpu_unsupported_reason,
        "fa3": flash_attention3.unsupported_reason,
        "flashinfer": flashinfer.unsupported_reason,
        "flashinfer-fa3": lambda geometry, kv: flashinfer.unsupported_reason(geometry, kv, "fa3"),
        "reference": lambda geometry, kv: None,
        "split": flash_decode.unsupported_reason,
    }


def check_backends(geometry: Geometry, kv: KVFormat, *, prefill: str, decode: str) -> None:
    """Check that the chosen backends support a KV cache, which need not be allocated yet.

    Raises:
        ValueError: an option names an unknown or unsupported backend; the message names the option, the
            reason and the alternatives.
    """
    if prefill == "split":
        raise ValueError(
            "attention split supports only decodes: choose another for prompts (--attention-prefill)"
        )
    checks = support_checks()
    for option, name in (("--attention-prefill", prefill), ("--attention-decode", decode)):
        if name == "auto":
            continue
        if name not in checks:
            raise ValueError(f"{option} must be one of auto, {', '.join(checks)}, not {name!r}")
        if reason := checks[name](geometry, kv):
            raise unsupported_error(f"{option} {name}", reason)


def select_backend(name: str, geometry: Geometry, kv: KVFormat, *, decode: bool) -> str:
    """Return `name`, or if it is `auto`, the name of the supported backend that was fastest in benchmarks.

    For decodes, Mizzen's own kernels are preferred: with GQA groups of up to eight, they were faster than fa3
    at every batch size (docs/benchmarks.md; benchmarks/attention.py measures all backends).
    """
    if name != "auto":
        return name
    if kv.device.type == "cpu":
        return "cpu"
    candidates = ["fa3", "flashinfer"]
    if decode:
        # With a GQA group of 16, at batches of 1, 32 and 256, fa3 took 10.7, 27 and 160 us, and split took
        # 12.6, 34 and 147 us. Over 8-bit KV, where fa3 also multiplies in 8 bits, fa3 was slower.
        fa3_is_faster = geometry.gqa_group_size > 8 and not kv.quantized
        candidates.insert(1 if fa3_is_faster else 0, "split")
    checks, reasons = support_checks(), list[str]()
    for candidate in candidates:
        if (reason := checks[candidate](geometry, kv)) is None:
            return candidate
        reasons.append(f"{candidate} does not run here: {reason}")
    log.warning("attention falls back to plain PyTorch, which is slow: %s", "; ".join(reasons))
    return "reference"


def make_attention(geometry: Geometry, kv: PagedKV, *, prefill: str, decode: str) -> MixedAttention:
    """Make the attention of an engine from the names of its backends; a name may be `auto`.

    Raises:
        ValueError: a name is unknown (the message lists the known ones), or its backend is not supported.
    """
    check_backends(geometry, kv, prefill=prefill, decode=decode)
    backends: dict[str, AttentionBackend] = {}
    names = [
        select_backend(decode, geometry, kv, decode=True),
        select_backend(prefill, geometry, kv, decode=False),
    ]
    for name in names:
        if name not in backends:
            backends[name] = FACTORIES[name](geometry, kv)
    return MixedAttention(kv, backends[names[0]], backends[names[1]], backend_names=(names[0], names[1]))
