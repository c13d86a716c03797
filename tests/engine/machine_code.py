# SPDX-License-Identifier: Apache-2.0
"""Runs the disassembler that Triton brings, on machine code compiled without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def disassemble(cubin: bytes, folder: Path, option: str) -> str:
    """Return the output of the disassembler for a cubin, which is written to `folder`."""
    if not DISASSEMBLER.exists():
        pytest.skip("there is no disassembler here")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [DISASSEMBLER, option, path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
