"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Callable

from mizzen.attention.base import AttentionBackend, Geometry, MixedAttention, PagedKV
from mizzen.attention.reference import ReferenceAttention

Factory = Callable[[Geometry, PagedKV], AttentionBackend]


def reference(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the backend that runs anywhere."""
    return ReferenceAttention(geometry, kv)


def cpu(geometry: Geometry, kv: PagedKV) -> AttentionBackend:
    """Make the backend that is fast on the CPU."""
    from mizzen.attention.cpu import CpuAttention

    if kv.keys.device.type != "cpu":
        raise ValueError(f"attention cpu does not run on {kv.keys.device.type}: choose reference or auto")
    return CpuAttention(geometry, kv)


FACTORIES: dict[str, Factory] = {"cpu": cpu, "reference": reference}
"""Heavy imports belong inside a factory: a backend is imported only where it is chosen."""


def choose(name: str, device: str) -> str:
    """Resolve `auto` for a device."""
    if name != "auto":
        return name
    return "cpu" if device == "cpu" else "reference"


def make_attention(geometry: Geometry, kv: PagedKV, *, prefill: str, decode: str) -> MixedAttention:
    """Make the attention of an engine from the names of its backends.

    Raises:
        ValueError: a name is unknown; the message lists those known.
    """
    device = kv.keys.device.type
    made: dict[str, AttentionBackend] = {}
    for name in (choose(prefill, device), choose(decode, device)):
        if name not in FACTORIES:
            raise ValueError(f"attention must be one of auto, {', '.join(FACTORIES)}, not {name!r}")
        if name not in made:
            made[name] = FACTORIES[name](geometry, kv)
    return MixedAttention(kv, made[choose(decode, device)], made[choose(prefill, device)])
