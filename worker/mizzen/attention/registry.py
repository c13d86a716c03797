"""Attention backends by name."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mizzen.attention.base import AttentionBackend, Geometry, KVFormat, MixedAttention, PagedKV, unsupported_error
from mizzen.attention.reference import ReferenceAttention

log = logging.getLogger(__name__)

Factory = Callable[[Geometry, PagedKV], AttentionBackend]
Missing = Callable[[Geometry, KVFormat], str | None]
"""Tells what keeps a backend from running over a cache of that kind; None when nothing does."""


def reference(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the backend that runs anywhere."""
    return ReferenceAttention(geometry, kv)


def cpu_unsupported_reason(geometry: Geometry, kv: KVFormat) -> str | None:
    """Tell what keeps the backend of the CPU from running."""
    return None if kv.device.type == "cpu" else f"it needs --device cpu, not {kv.device.type}"


def cpu(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the backend that is fast on the CPU."""
    from mizzen.attention.cpu import CpuAttention

    if why := cpu_unsupported_reason(geometry, kv):
        raise unsupported_error("attention cpu", why)
    return CpuAttention(geometry, kv)


def fa3(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the backend that is fast on Hopper."""
    from mizzen.attention.flash_attention3 import FlashAttention3

    return FlashAttention3(geometry, kv)


def split(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the backend of our own kernel, for decodes."""
    from mizzen.attention.flash_decode import FlashDecodeAttention

    return FlashDecodeAttention(geometry, kv)


def flashinfer(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make FlashInfer's backend, of the kernels that run on Ampere and later."""
    from mizzen.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(geometry, kv, "fa2")


def flashinfer_fa3(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make FlashInfer's backend, of the kernels for Hopper."""
    from mizzen.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(geometry, kv, "fa3")


FACTORIES: dict[str, Factory] = {
    "cpu": cpu,
    "fa3": fa3,
    "flashinfer": flashinfer,
    "flashinfer-fa3": flashinfer_fa3,
    "reference": reference,
    "split": split,
}
"""Heavy imports belong inside a factory: a backend is imported only where it is chosen."""


def unsupported_reasons() -> dict[str, Missing]:
    """Return what asks of each backend whether it runs."""
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
    """Refuse backends that do not run over a cache; it need not be allocated.

    Raises:
        ValueError: names the option, why not, and the way out.
    """
    if prefill == "split":
        raise ValueError(
            "attention split serves decodes alone: select_backend another for prompts (--attention-prefill)"
        )
    missing = unsupported_reasons()
    for option, name in (("--attention-prefill", prefill), ("--attention-decode", decode)):
        if name == "auto":
            continue
        if name not in missing:
            raise ValueError(f"{option} must be one of auto, {', '.join(missing)}, not {name!r}")
        if why := missing[name](geometry, kv):
            raise unsupported_error(f"{option} {name}", why)


def select_backend(name: str, geometry: Geometry, kv: KVFormat, *, decode: bool) -> str:
    """Resolve `auto` for a device and a shape of heads: the fastest that was measured, of those that run.

    Decodes go to our own kernel first, which was faster than fa3 at every batch where at most eight query
    heads share a KV head (docs/benchmarks.md, and benchmarks/attention.py, which measures all of them).
    """
    if name != "auto":
        return name
    if kv.device.type == "cpu":
        return "cpu"
    candidates = ["fa3", "flashinfer"]
    if decode:
        # Of 16 query heads a KV head, fa3 took 10.7, 27 and 160 us at batches of 1, 32 and 256, split 12.6,
        # 34 and 147; over 8-bit KV fa3 multiplies in 8 bits as well, and was the slower one.
        behind_fa3 = geometry.gqa_group_size > 8 and not kv.quantized
        candidates.insert(1 if behind_fa3 else 0, "split")
    missing, reasons = unsupported_reasons(), list[str]()
    for candidate in candidates:
        if (why := missing[candidate](geometry, kv)) is None:
            return candidate
        reasons.append(f"{candidate} does not run here: {why}")
    log.warning("attention runs by plain PyTorch, which is slow: %s", "; ".join(reasons))
    return "reference"


def make_attention(geometry: Geometry, kv: PagedKV, *, prefill: str, decode: str) -> MixedAttention:
    """Make the attention of an engine from the names of its backends.

    Raises:
        ValueError: a name is unknown (the message lists those known), or its backend does not run here.
    """
    check_backends(geometry, kv, prefill=prefill, decode=decode)
    made: dict[str, AttentionBackend] = {}
    chosen = [
        select_backend(decode, geometry, kv, decode=True),
        select_backend(prefill, geometry, kv, decode=False),
    ]
    for name in chosen:
        if name not in made:
            made[name] = FACTORIES[name](geometry, kv)
    return MixedAttention(kv, made[chosen[0]], made[chosen[1]], backend_names=(chosen[0], chosen[1]))
