# SPDX-License-Identifier: Apache-2.0
"""Memory of common GPUs, by the names that `mizzen inspect --gpu` accepts."""

from __future__ import annotations

import re

MIB, GIB = 1 << 20, 1 << 30
GPUS: dict[str, float] = {
    "a10": 22.0,
    "a100": 79.2,
    "a100-40gb": 39.4,
    "a100-80gb": 79.2,
    "b200": 178.3,
    "h100": 79.1,
    "h200": 139.8,
    "l4": 22.0,
    "l40s": 44.4,
    "rtx-4090": 23.5,
    "rtx-5090": 31.3,
    "rtx-a6000": 47.4,
}
"""Memory in GiB that CUDA reports for a GPU: a little less than its nominal size."""
HOPPER = ("h100", "h200")
"""GPUs with kernels for quantized weights."""
WITHOUT_FP8 = ("a10", "a100", "a100-40gb", "a100-80gb", "rtx-a6000")
"""GPUs without FP8 instructions, which an FP8 KV cache needs."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib?|g|mib?)?", re.IGNORECASE)


def gpu_bytes(name: str) -> int:
    """Return the memory of a GPU in bytes.

    Args:
        name: a key of `GPUS`, a size in GiB such as "24" or "24GiB", or a size in MiB such as "9856Mi".

    Raises:
        ValueError: the name is unknown, and not a size.
    """
    key = name.strip().lower().replace("_", "-").removeprefix("nvidia-")
    if key in GPUS:
        return int(GPUS[key] * GIB)
    match = _SIZE.fullmatch(key)
    if match is None or not float(match[1]):
        raise ValueError(
            "must be a size in GiB, such as 24, a size such as 79Gi or 9856Mi, or one of "
            f"{', '.join(GPUS)}, not {name!r}"
        )
    return int(float(match[1]) * (MIB if (match[2] or "").startswith("m") else GIB))


def has_quantized_kernels(described: str) -> bool:
    """Return whether a GPU has fast kernels for quantized weights; True if only its size is known.

    `described` is the size of its memory, with its name in brackets if it has one.
    """
    return (name := _read_name(described)) == "" or name in HOPPER


def has_fp8_cache(described: str) -> bool:
    """Return whether a GPU can use an FP8 KV cache; `described` as for `has_quantized_kernels`."""
    return _read_name(described) not in WITHOUT_FP8


def _read_name(described: str) -> str:
    return described.partition("(")[2].rstrip(")").lower().replace("_", "-").removeprefix("nvidia-")
