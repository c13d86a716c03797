# SPDX-License-Identifier: Apache-2.0
"""Check that the image's C compiler builds Triton's modules, and that launchers pass arguments correctly.

This needs no GPU: an imitation of libcuda records what a launcher passes to it. Triton itself builds the
modules, with $CC. Prints the names of the checked modules.

    CC=/opt/mizzen/libexec/cc /opt/mizzen/bin/python scripts/images/check_launchers.py
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import launchers
from triton.backends.nvidia import driver
from triton.runtime.build import compile_module_from_src

LIBCUDA = """
#include "cuda.h"
#include <string.h>
int sizes[256], count, geometry[7];
unsigned long long stream, function;
unsigned char recorded[256][128];
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer; return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {
  int grid[] = {c->gridDimX, c->gridDimY, c->gridDimZ};
  int block[] = {c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes};
  memcpy(geometry, grid, sizeof grid);
  memcpy(geometry + 3, block, sizeof block);
  stream = (unsigned long long)c->hStream; function = (unsigned long long)f;
  for (int i = 0; i < count; i++) memcpy(recorded[i], parameters[i], sizes[i]);
  return CUDA_SUCCESS;
}
"""
PACKED = {
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "B",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
}
PACKED |= {"i1": "b", "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d"}
"""Formats of `struct` for the types of scalar arguments, except `bf16`."""
VALUES = {"u64": 2**64 - 3, "i64": -(2**40) - 1, "i32": -70_000, "u32": 2**32 - 2, "i16": -300, "u16": 65_000}
GRID = (5, 3, 2)
WARPS, SHARED, STREAM, FUNCTION = 4, 4096, 0x1234_5678_9ABC, 0xFEDC_BA98


def make_libcuda(folder: Path) -> ctypes.CDLL:
    """Compile and load the imitation of libcuda; modules that need `libcuda.so.1` then use it.

    It has all functions that the modules call. A function that is not part of `LIBCUDA` reports an error.
    """
    modules = "".join(launchers.module_sources().values())
    called = set(re.findall(r"\bcu[A-Z]\w+(?=\()", modules))
    others = sorted(name for name in called if f"{name}(" not in LIBCUDA)
    source, failing, library = folder / "libcuda.c", folder / "failing.c", folder / "libcuda.so.1"
    source.write_text(LIBCUDA)
    failing.write_text("".join(f"int {name}() {{ return 999; }}\n" for name in others))  # CUDA_ERROR_UNKNOWN
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{launchers.TRITON_HEADERS}"]
    subprocess.run([os.environ["CC"], *options, "-o", library, source, failing], check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def example(kind: object) -> object:
    """Return an argument of a type; the arguments of a tuple are a tuple."""
    if isinstance(kind, tuple):
        return tuple(example(part) for part in kind)
    kind = str(kind)
    if kind == "nvTmaDesc":
        return driver.PyCUtensorMap()
    if kind.startswith("*"):
        return 0x7F00_0000_1000 + len(kind)
    return VALUES.get(kind, -1.75 if "f" in kind else 1)


def passed(kind: object, value: object) -> Iterator[bytes]:
    """Yield the bytes that a kernel must get for an argument: none for a constant."""
    if isinstance(kind, tuple) and isinstance(value, tuple):
        for part in zip(kind, value, strict=True):
            yield from passed(*part)
    elif kind == "nvTmaDesc":
        yield ctypes.string_at(id(value) + 128, 128)
    elif kind == "bf16":
        yield struct.pack("<f", value)[2:]
    elif str(kind).startswith("*"):
        yield struct.pack("<Q", value)
    elif kind != "constexpr":
        yield struct.pack(f"<{PACKED[str(kind)]}", value)


def check_launcher(types: tuple[object, ...], libcuda: ctypes.CDLL) -> None:
    """Build the launcher for a signature, call it, and compare what libcuda got.

    Raises:
        ValueError: libcuda got something else.
    """
    module = compile_module_from_src(
        src=launchers.launcher_source(types),
        name="__triton_launcher",
        library_dirs=driver.library_dirs(),
        include_dirs=driver.include_dirs,
        libraries=driver.libraries,
    )
    values = [example(kind) for kind in types]
    expected = list(passed(tuple(types), tuple(values)))
    expected += [bytes(8), bytes(8)]  # scratch memory
    sizes = (ctypes.c_int * 256).in_dll(libcuda, "sizes")
    sizes[: len(expected)] = [len(item) for item in expected]
    ctypes.c_int.in_dll(libcuda, "count").value = len(expected)
    metadata = (WARPS, 1, SHARED)
    module.launch(*GRID, STREAM, FUNCTION, 0, 0, None, None, metadata, None, None, None, *values)
    rows = (ctypes.c_ubyte * 128 * 256).in_dll(libcuda, "recorded")
    got = [bytes(rows[index])[: len(item)] for index, item in enumerate(expected)]
    geometry = tuple((ctypes.c_int * 7).in_dll(libcuda, "geometry"))
    handles = tuple(ctypes.c_uint64.in_dll(libcuda, name).value for name in ("stream", "function"))
    if got != expected or geometry != (*GRID, 32 * WARPS, 1, 1, SHARED) or handles != (STREAM, FUNCTION):
        raise ValueError(
            f"{types}: the launcher passed {got}, {geometry} and {handles}, instead of {expected}"
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TRITON_CACHE_DIR"] = f"{temporary}/cache"
        os.environ["TRITON_LIBCUDA_PATH"] = temporary
        libcuda = make_libcuda(Path(temporary))
        driver.CudaUtils()
        print("utilities")
        for name, types in launchers.SIGNATURES.items():
            check_launcher(types, libcuda)
            print(f"launcher: {name}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{os.environ.get('CC')} cannot build Triton's modules: {error}")
