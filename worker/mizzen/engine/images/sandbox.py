# SPDX-License-Identifier: Apache-2.0
"""Confines a process that decodes hostile input: limits on its resources and on its system calls.

A seccomp filter (seccomp(2), SECCOMP_MODE_FILTER) lets the process use memory, its open file descriptors and
the clock. All other calls fail with EPERM, among them calls that open files, create sockets, processes or
threads, send signals, trace processes, or make memory executable.

Linux before 5.16 also disables speculative store bypass and indirect branch speculation in processes with a
filter, because it assumes that they run untrusted code. The filter here asks the kernel to leave both as they
are in ordinary processes (SECCOMP_FILTER_FLAG_SPEC_ALLOW), as newer kernels do by default: the process runs
no untrusted code, and its memory holds no secrets.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import struct
import sys
from dataclasses import dataclass

from mizzen.common.child_process import limit_memory

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4
SECCOMP_RET_KILL_PROCESS = 0x80000000
SECCOMP_RET_ERRNO = 0x00050000
SECCOMP_RET_ALLOW = 0x7FFF0000
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x45, 0x06
"""Instructions of classic BPF: BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ, BPF_JMP|BPF_JSET, BPF_RET."""
NUMBER_OFFSET, ARCHITECTURE_OFFSET, THIRD_ARGUMENT_OFFSET = 0, 4, 32
"""Offsets in bytes within struct seccomp_data, for little-endian machines."""
PROT_EXEC = 4
MAX_DESCRIPTORS = 16
"""Maximum number of open file descriptors of the process."""


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """Numbers of the allowed system calls on an architecture."""

    architecture: int
    """Value of AUDIT_ARCH_* in linux/audit.h."""
    memory: tuple[int, ...]
    """mmap and mprotect, whose third argument is the protection; they are allowed without PROT_EXEC."""
    others: tuple[int, ...]
    seccomp: int
    """seccomp(2), which the process calls before it is confined."""


NUMBERS = {
    # name: (number on x86_64, number on aarch64); see syscall_64.tbl and asm-generic/unistd.h
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "fcntl": (72, 25),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "restart_syscall": (219, 128),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "clock_gettime": (228, 113),
    "gettimeofday": (96, 169),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
"""Allowed system calls."""
MEMORY_CALLS = ("mmap", "mprotect")


def _calls(architecture: int, column: int, seccomp: int) -> SystemCalls:
    numbers = {name: pair[column] for name, pair in NUMBERS.items()}
    memory = tuple(numbers.pop(name) for name in MEMORY_CALLS)
    return SystemCalls(architecture, memory, tuple(numbers.values()), seccomp)


SYSTEM_CALLS = {"x86_64": _calls(0xC000003E, 0, 317), "aarch64": _calls(0xC00000B7, 1, 277)}
"""Allowed system calls by the machine's name."""


class _FilterProgram(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def limit_resources(memory_bytes: int) -> None:
    """Forbid this process to write files, and limit its descriptors and its memory.

    Args:
        memory_bytes: Maximum address space in bytes, in addition to what the process uses now.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    limit_memory(memory_bytes)


def prefer_in_memory_shortage() -> None:
    """Let the kernel end this process first if memory runs out, rather than the engine."""
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def restrict_system_calls() -> bool:
    """Install the filter in this process, for good; return False if the system does not support it."""
    calls = SYSTEM_CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    code = b"".join(build_filter(calls))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _FilterProgram(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    zero = ctypes.c_ulong(0)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero):
        return False
    flags = ctypes.c_ulong(SECCOMP_FILTER_FLAG_SPEC_ALLOW)
    mode = ctypes.c_ulong(SECCOMP_SET_MODE_FILTER)
    if libc.syscall(ctypes.c_long(calls.seccomp), mode, flags, ctypes.byref(program)) == 0:
        return True
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)  # of kernels before 4.17, which do not know the flag
    return libc.prctl(PR_SET_SECCOMP, mode, ctypes.byref(program), zero, zero) == 0


def build_filter(calls: SystemCalls) -> list[bytes]:
    """Return the instructions of the filter, each a struct sock_filter of 8 bytes."""
    allow = _instruction(RETURN, SECCOMP_RET_ALLOW)
    refuse = _instruction(RETURN, SECCOMP_RET_ERRNO | errno.EPERM)
    program = [
        _instruction(LOAD_WORD, ARCHITECTURE_OFFSET),
        _instruction(JUMP_IF_EQUAL, calls.architecture, 1, 0),
        _instruction(RETURN, SECCOMP_RET_KILL_PROCESS),
        _instruction(LOAD_WORD, NUMBER_OFFSET),
    ]
    for number in calls.memory:
        program += [
            _instruction(JUMP_IF_EQUAL, number, 0, 4),
            _instruction(LOAD_WORD, THIRD_ARGUMENT_OFFSET),
            _instruction(JUMP_IF_SET, PROT_EXEC, 1, 0),
            allow,
            refuse,
        ]
    for number in calls.others:
        program += [_instruction(JUMP_IF_EQUAL, number, 0, 1), allow]
    return [*program, refuse]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
