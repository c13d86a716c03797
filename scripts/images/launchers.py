# SPDX-License-Identifier: Apache-2.0
"""Sources of the C modules that Triton compiles at run time: its utilities, and launchers of kernels."""

from __future__ import annotations

from pathlib import Path

from triton.backends.nvidia import driver

TRITON_HEADERS = Path(driver.__file__).parent / "include"
INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
SCALARS = (*INTEGERS, "fp16", "bf16", "fp32", "f32", "fp64")
"""All types of scalar arguments."""
SIGNATURES = {
    "no arguments": (),
    "pointers": ("*bf16", "*fp32", "*i32", "*i64", "*u8"),
    "scalars": SCALARS,
    "constants": ("*bf16", "constexpr", "i32", "constexpr"),
    "tuples": (("*fp32", "i32", ("i64", "constexpr")), "fp32"),
    "descriptors": ("nvTmaDesc", "i32"),
    "many": ("*bf16", "i32", "fp32") * 20,
}
"""Types of arguments, in which every kind occurs that a launcher distinguishes."""


def module_sources() -> dict[str, str]:
    """Return the sources by name: `utilities`, and a launcher for each of `SIGNATURES`."""
    utilities = Path(driver.__file__).with_name("driver.c").read_text()
    return {"utilities": utilities, **{name: launcher_source(types) for name, types in SIGNATURES.items()}}


def launcher_source(types: tuple[object, ...]) -> str:
    """Return the source of the launcher for kernels with arguments of these types."""
    return driver.make_launcher({}, dict(enumerate(types)), None)
