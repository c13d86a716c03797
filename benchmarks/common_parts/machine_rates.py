# SPDX-License-Identifier: Apache-2.0
"""Measures the memory bandwidth and the bfloat16 rate of the first visible GPU, for the limits of benchmarks.

The measurement runs in a child process, because the process of the benchmark must not have a
CUDA context or hold memory before the engine is loaded:

    python -m common_parts.machine_rates      (in the folder benchmarks)
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

BUFFER_BYTES = 2 << 30
"""Bytes of the buffer that is read: far more than the L2 cache of any GPU."""
MATRIX = 8192
"""Rows and columns of the matrices whose product is timed."""
WARM_UPS = 3
ROUNDS = 11
TIMEOUT = 120.0
"""Seconds after which a measurement has failed."""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Rates of one GPU."""

    bandwidth: float
    """Memory bandwidth in bytes per second: the highest of the rates of a copy, a sum and a matrix-vector
    product. A copy counts the bytes that are read and the bytes that are written."""
    flops: float
    """Floating-point operations per second of a bfloat16 GEMM of random square matrices."""


def measure_in_child_process() -> MachineRates:
    """Return the rates of the first visible GPU, measured in a child process.

    Raises:
        RuntimeError: the measurement failed; the message contains the child's last line.
    """
    command = [sys.executable, "-m", "common_parts.machine_rates"]
    folder = Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the rates of the GPU were not measured within {TIMEOUT:.0f} s") from None
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the rates of the GPU cannot be measured: {cause}")
    return MachineRates(**json.loads(done.stdout))


def median_seconds(step: Callable[[], object]) -> float:
    """Return the median GPU time of `step` in seconds, after some warm-ups."""
    import torch

    for _ in range(WARM_UPS):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) for first, second in itertools.pairwise(marks)]
    return statistics.median(times) / 1e3


def measure() -> MachineRates:
    """Return the rates of the current GPU."""
    import torch

    source = torch.randn(BUFFER_BYTES // 2 // MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    vector = torch.randn(MATRIX, dtype=torch.bfloat16, device="cuda")
    words = source.view(torch.int32)
    seconds_per_byte = min(
        median_seconds(lambda: target.copy_(source)) / (2 * BUFFER_BYTES),
        median_seconds(lambda: words.sum()) / BUFFER_BYTES,
        median_seconds(lambda: source @ vector) / BUFFER_BYTES,
    )
    left, right = source[:MATRIX], source[MATRIX : 2 * MATRIX]
    seconds = median_seconds(lambda: torch.mm(left, right, out=target[:MATRIX]))
    return MachineRates(bandwidth=1 / seconds_per_byte, flops=2 * MATRIX**3 / seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
