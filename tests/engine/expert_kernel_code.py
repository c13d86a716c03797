# SPDX-License-Identifier: Apache-2.0
"""Machine code of Triton kernels of experts for Hopper, compiled without a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from machine_code import disassemble
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {"blocks": "i32", "chosen": "*i64", "weights": "*fp32", "pairs": "*i32", "block_experts": "*i32"}


class Compiled:
    """Machine code of a kernel, its registers spilled to memory, and its shared memory in bytes."""

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, Any],
        types: Mapping[str, str],
        folder: Path,
        **options: int,
    ) -> None:
        numbers = dict.fromkeys(("limit", "slope", "floor", "scale"), "fp32")
        known = {**numbers, **TYPES, **types, **dict.fromkeys(constants, "constexpr")}
        signature = {name: known.get(name, "*bf16") for name in kernel.arg_names}
        aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
        source = ASTSource(
            kernel, signature, dict(constants), {(i,): [["tt.divisibility", 16]] for i in aligned}
        )
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        cubin = code.asm["cubin"]
        self.shared = code.metadata.shared
        self.instructions = disassemble(cubin, folder, "--dump-sass")
        self.spilled = "STACK:0 " not in disassemble(cubin, folder, "--dump-resource-usage")

    def find(self, pattern: str) -> list[str]:
        """Return the instructions that match a pattern, in order."""
        return re.findall(rf"\b({pattern})\b", self.instructions)
