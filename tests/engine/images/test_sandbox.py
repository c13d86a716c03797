# SPDX-License-Identifier: Apache-2.0
"""The filter of system calls, run by a small interpreter for both architectures."""

from __future__ import annotations

import struct

import pytest

from mizzen.engine.images import sandbox

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050001
NAMES = {"x86_64": 0, "aarch64": 1}
X32_BIT = 0x40000000


def run_filter(machine: str, number: int, protection: int = 0, architecture: int | None = None) -> int:
    """Return the filter's verdict on a call."""
    calls = sandbox.SYSTEM_CALLS[machine]
    if architecture is None:
        architecture = calls.architecture
    data = struct.pack("=IIQ6Q", number, architecture, 0, 0, 4096, protection, 0, 0, 0)
    program = [struct.unpack("=HBBI", instruction) for instruction in sandbox.build_filter(calls)]
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return value
        else:
            assert code in (0x15, 0x45)
            holds = accumulator == value if code == 0x15 else bool(accumulator & value)
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", NAMES)
def test_exactly_the_listed_calls_are_allowed(machine: str) -> None:
    allowed = {number for number in range(600) if run_filter(machine, number) == ALLOW}
    assert allowed == {numbers[NAMES[machine]] for numbers in sandbox.NUMBERS.values()}
    assert {run_filter(machine, number) for number in range(600) if number not in allowed} == {REFUSE}


@pytest.mark.parametrize("machine", NAMES)
@pytest.mark.parametrize("call", ["mmap", "mprotect"])
def test_memory_must_not_be_executable(machine: str, call: str) -> None:
    number = sandbox.NUMBERS[call][NAMES[machine]]
    assert [run_filter(machine, number, protection) for protection in (0, 1, 3)] == [ALLOW] * 3
    assert [run_filter(machine, number, protection) for protection in (4, 5, 7)] == [REFUSE] * 3


def test_other_architectures_and_their_numbers_are_refused() -> None:
    """A process can call the kernel with 32 bits (i386: other numbers) or as x32 (a bit in the number)."""
    i386 = 0x40000003
    assert run_filter("x86_64", 0, architecture=i386) == KILL
    assert run_filter("aarch64", 0, architecture=0x40000028) == KILL
    assert run_filter("x86_64", X32_BIT | 0) == REFUSE
