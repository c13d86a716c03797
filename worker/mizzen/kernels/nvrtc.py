# SPDX-License-Identifier: Apache-2.0
"""Compiles CUDA C++ kernels with NVRTC, caches them on disk, and launches them with PDL.

Callers check `can_compile` first and fall back to a slower implementation if a kernel cannot be compiled, so
a missing or old compiler never stops the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from mizzen.common.cache import cache_dir, write_atomically

log = logging.getLogger(__name__)

KernelSpec = tuple[str, str, tuple[tuple[str, int], ...]]
"""Source text, kernel name, and preprocessor definitions as (name, value) pairs."""
COMPILE_THREADS = 4
"""Kernels of a layer that are compiled at the same time."""
DIGEST_BYTES = hashlib.sha256().digest_size
"""Length of a SHA-256 digest in bytes."""


class CompileError(RuntimeError):
    """NVRTC or the driver rejected a kernel; the message gives the reason."""


def read_source(name: str) -> str:
    """Return the text of the CUDA source `{name}.cu`, where `name` is a path such as `gemm/gemv`."""
    return Path(__file__).parent.joinpath(f"{name}.cu").read_text(encoding="utf-8")


def check_status(result: tuple[Any, ...], action: str) -> Any:
    """Check the status that a CUDA binding returned, and return the results that follow the status.

    Args:
        result: Return value of the binding: the status, then the results.
        action: Description of the call for the error message.

    Raises:
        CompileError: the status is not success.
    """
    if int(result[0]) != 0:
        raise CompileError(f"{action}: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def compile_cubin(
    source: str, name: str, defines: tuple[tuple[str, int], ...], capability: tuple[int, int]
) -> bytes:
    """Compile a CUDA source with preprocessor definitions to a cubin for a compute capability.

    Raises:
        CompileError: the source does not compile; the message is the compiler's log.
    """
    from cuda.bindings import nvrtc

    program = check_status(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []), name)
    # Hopper's own instructions need the architecture-specific target sm_90a.
    target = f"sm_{capability[0]}{capability[1]}{'a' if capability == (9, 0) else ''}"
    options = [f"-arch={target}", *(f"-D{key}={value}" for key, value in defines)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status[0]) != 0:
        text = b" " * check_status(nvrtc.nvrtcGetProgramLogSize(program), name)
        nvrtc.nvrtcGetProgramLog(program, text)
        raise CompileError(text.decode())
    code = b" " * check_status(nvrtc.nvrtcGetCUBINSize(program), name)
    check_status(nvrtc.nvrtcGetCUBIN(program, code), name)
    return code


def load_or_compile_cubin(
    source: str, name: str, defines: tuple[tuple[str, int], ...], capability: tuple[int, int]
) -> bytes:
    """Return a kernel's cubin from the disk cache, or compile it and write it to the cache.

    A cached file holds the cubin's SHA-256 digest followed by the cubin. The kernel is compiled again if a
    crash truncated the file, or if the folder cannot be read or written.

    Raises:
        CompileError: the source does not compile, or the compiler is missing.
    """
    from cuda.bindings import nvrtc

    try:
        version = check_status(nvrtc.nvrtcVersion(), name)
    except RuntimeError as error:  # NVRTC itself is missing
        raise CompileError(f"NVRTC cannot be loaded: {error}") from error
    key = hashlib.sha256(repr((source, name, defines, capability, version)).encode()).hexdigest()
    path = cache_dir() / "kernels" / f"{name}-{key}.cubin"
    with contextlib.suppress(OSError):
        kept = path.read_bytes()
        if hashlib.sha256(kept[DIGEST_BYTES:]).digest() == kept[:DIGEST_BYTES]:
            return kept[DIGEST_BYTES:]
        log.warning("%s is damaged; compiling the kernel again", path)
    code = compile_cubin(source, name, defines, capability)
    with contextlib.suppress(OSError):
        write_atomically(path, hashlib.sha256(code).digest() + code)
    return code


@functools.cache
def load_kernel(source: str, name: str, defines: tuple[tuple[str, int], ...], device: int) -> Any:
    """Compile a kernel for a device unless it is cached, load it, and return it (a CUfunction).

    Raises:
        CompileError: the kernel cannot be compiled on this machine.
    """
    from cuda.bindings import driver

    code = load_or_compile_cubin(source, name, defines, torch.cuda.get_device_capability(device))
    torch.cuda.current_stream(device)  # creates a CUDA context
    module = check_status(driver.cuModuleLoadData(code), f"loading {name}")
    return check_status(driver.cuModuleGetFunction(module, name.encode()), f"loading {name}")


def compile_in_parallel(kernels: Iterable[KernelSpec], device: int, threads: int) -> None:
    """Compile and load kernels with `threads` threads, so that later calls of `load_kernel` are fast.

    Raises:
        CompileError: a kernel cannot be compiled on this machine.
    """
    from cuda.bindings import driver

    torch.cuda.current_stream(device)  # creates a CUDA context
    context = check_status(driver.cuCtxGetCurrent(), "getting the CUDA context")

    def begin() -> None:
        check_status((*driver.cuCtxSetCurrent(context), None), "setting the CUDA context")

    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        list(pool.map(lambda kernel: load_kernel(*kernel, device), kernels))


@functools.cache
def allow_shared_memory(function: Any, shared_bytes: int) -> None:
    """Raise a kernel's limit on dynamic shared memory per block to `shared_bytes`, unless it is higher.

    Raises:
        CompileError: the device does not have that much shared memory per block.
    """
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    action = "raising the limit on shared memory"
    if check_status(driver.cuFuncGetAttribute(attribute, function), action) < shared_bytes:
        check_status((*driver.cuFuncSetAttribute(function, attribute, shared_bytes), None), action)


def can_compile(
    source: str,
    name: str,
    defines: tuple[tuple[str, int], ...],
    device: torch.device,
    fallback: str,
    shared_bytes: int = 0,
) -> bool:
    """Compile a kernel and return whether it can be used; if not, log a warning that names the `fallback`.

    `fallback` is a clause such as "attention falls back to Triton". `shared_bytes` is the dynamic shared
    memory of a block in bytes, besides the memory that the kernel declares.
    """
    try:
        function = load_kernel(source, name, defines, device.index or 0)
        if shared_bytes:
            allow_shared_memory(function, shared_bytes)
    except (ImportError, CompileError) as error:
        log.warning("a kernel cannot be compiled, so %s, which is slower: %s", fallback, error)
        return False
    return True


@functools.cache
def can_compile_all(kernels: frozenset[tuple[KernelSpec, int]], device: torch.device, fallback: str) -> bool:
    """Compile kernels in parallel and return whether all can be used; if not, log a warning, once.

    `kernels` are specs, each with the dynamic shared memory of a block in bytes; for `fallback` see
    `can_compile`.
    """
    with contextlib.suppress(ImportError, CompileError):  # `can_compile` reports them
        compile_in_parallel({spec for spec, _ in kernels}, device.index or 0, COMPILE_THREADS)
    return all(can_compile(*spec, device, fallback, shared_bytes) for spec, shared_bytes in kernels)


@functools.lru_cache(1024)
def launch_config(
    blocks: tuple[int, int, int],
    threads: int,
    stream: int,
    cluster: tuple[int, int, int] | None = None,
    shared_bytes: int = 0,
) -> Any:
    """Return a launch configuration (CUlaunchConfig) with PDL enabled; for parameters see `launch`.

    With PDL, the kernel may start while the previous one still runs. `stream` is the stream's handle.
    """
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream, config.sharedMemBytes = stream, shared_bytes
    attributes = [attribute]
    if cluster is not None:
        together = driver.CUlaunchAttribute()
        together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = together.value.clusterDim
        size.x, size.y, size.z = cluster
        attributes.append(together)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def launch(
    function: Any,
    blocks: int | tuple[int, int, int],
    threads: int,
    arguments: tuple[Any, ...],
    *,
    cluster: tuple[int, int, int] | None = None,
    shared_bytes: int = 0,
) -> None:
    """Launch a kernel on the current stream.

    Args:
        function: Kernel that `load_kernel` returned.
        blocks: Number of blocks in the grid, in one or three dimensions.
        threads: Threads per block.
        arguments: Kernel arguments, at least one of them a tensor. Tensors are passed by address, None as a
            null pointer, integers as int, floats as float, and driver structures (a CUtensorMap) unchanged.
        cluster: Number of blocks in a cluster by dimension; None for a launch without clusters.
        shared_bytes: Dynamic shared memory of a block in bytes.

    Raises:
        CompileError: the driver rejected the launch, or the device lacks the shared memory.
    """
    from cuda.bindings import driver

    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    values, types = [], []
    for argument in arguments:
        if argument is None or isinstance(argument, torch.Tensor):
            values.append(0 if argument is None else argument.data_ptr())
            types.append(ctypes.c_void_p)
        else:
            values.append(argument)
            types.append({int: ctypes.c_int, float: ctypes.c_float}.get(type(argument)))
    grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
    if shared_bytes:
        allow_shared_memory(function, shared_bytes)
    stream = torch.cuda.current_stream(device).cuda_stream
    config = launch_config(grid, threads, stream, cluster, shared_bytes)
    check_status(
        driver.cuLaunchKernelEx(config, function, (tuple(values), tuple(types)), 0), "launching a kernel"
    )
