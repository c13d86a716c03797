"""Compiles kernels written in CUDA C++, and launches them while the kernel ahead of them still runs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

KernelSpec = tuple[str, str, tuple[tuple[str, int], ...]]
"""A source, the name of a kernel in it, and what it is compiled with."""
DIGEST = hashlib.sha256().digest_size
"""Bytes of one."""


class CompileError(RuntimeError):
    """NVRTC or the driver refused a kernel; the message says why."""


def read_source(name: str) -> str:
    """Return the CUDA C++ source `{name}.cu`; `name` is a path below this package, e.g. `gemm/gemv`."""
    return Path(__file__).parent.joinpath(f"{name}.cu").read_text(encoding="utf-8")


def check_status(result: tuple[Any, ...], what: str) -> Any:
    """Return what a call of the CUDA bindings gives besides its status.

    Raises:
        CompileError: the status is not success.
    """
    if int(result[0]) != 0:
        raise CompileError(f"{what}: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def compile_cubin(source: str, name: str, defines: tuple[tuple[str, int], ...], capability: tuple[int, int]) -> bytes:
    """Compile a source with these definitions for a GPU's capability.

    Raises:
        CompileError: it does not compile; the message is the compiler's.
    """
    from cuda.bindings import nvrtc

    program = check_status(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []), name)
    # Hopper's own instructions are in a target of their own.
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


def cache_dir() -> Path:
    """Return where compiled kernels are kept: $MIZZEN_CACHE_DIR, else below the user's cache folder."""
    if chosen := os.environ.get("MIZZEN_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mizzen"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, whoever else writes it meanwhile.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def load_or_compile_cubin(
    source: str, name: str, defines: tuple[tuple[str, int], ...], capability: tuple[int, int]
) -> bytes:
    """Return what `cubin` returns, from an earlier run's where there is a whole one.

    A file is the code's SHA-256 and the code. A folder that cannot be read or written, and a file that
    a crash cut, cost the time of compiling, and nothing else.

    Raises:
        CompileError: it does not compile, or there is no compiler.
    """
    from cuda.bindings import nvrtc

    try:
        version = check_status(nvrtc.nvrtcVersion(), name)
    except RuntimeError as error:  # the library itself is missing
        raise CompileError(f"NVRTC cannot be loaded: {error}") from error
    key = hashlib.sha256(repr((source, name, defines, capability, version)).encode()).hexdigest()
    path = cache_dir() / "kernels" / f"{name}-{key}.cubin"
    with contextlib.suppress(OSError):
        kept = path.read_bytes()
        if hashlib.sha256(kept[DIGEST:]).digest() == kept[:DIGEST]:
            return kept[DIGEST:]
        log.warning("%s is damaged: the kernel is compiled anew", path)
    code = compile_cubin(source, name, defines, capability)
    with contextlib.suppress(OSError):
        write_atomically(path, hashlib.sha256(code).digest() + code)
    return code


@functools.cache
def load_kernel(source: str, name: str, defines: tuple[tuple[str, int], ...], device: int) -> Any:
    """Return a kernel (a CUfunction) of a source, compiled with these definitions for a device.

    Raises:
        CompileError: it cannot be compiled here.
    """
    from cuda.bindings import driver

    code = load_or_compile_cubin(source, name, defines, torch.cuda.get_device_capability(device))
    torch.cuda.current_stream(device)  # a context is there
    module = check_status(driver.cuModuleLoadData(code), f"loading {name}")
    return check_status(driver.cuModuleGetFunction(module, name.encode()), f"loading {name}")


def compile_in_parallel(kernels: Iterable[KernelSpec], device: int, threads: int) -> None:
    """Compile kernels that `compiled` is going to be asked for, so many at a time.

    Raises:
        CompileError: one cannot be compiled here.
    """
    from cuda.bindings import driver

    torch.cuda.current_stream(device)  # a context is there
    context = check_status(driver.cuCtxGetCurrent(), "asking for the context")

    def begin() -> None:
        check_status((*driver.cuCtxSetCurrent(context), None), "entering the context")

    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        list(pool.map(lambda kernel: load_kernel(*kernel, device), kernels))


@functools.cache
def allow_shared_memory(function: Any, shared: int) -> None:
    """Let a kernel have so many bytes of shared memory.

    Raises:
        CompileError: a block cannot have as many here.
    """
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check_status((*driver.cuFuncSetAttribute(function, attribute, shared), None), "asking for shared memory")


def can_compile(
    source: str,
    name: str,
    defines: tuple[tuple[str, int], ...],
    device: torch.device,
    otherwise: str,
    shared: int = 0,
) -> bool:
    """Compile a kernel; False, with a warning of what is done `otherwise`, where it cannot be used here.

    `shared` is what a block of it has besides what the kernel declares, in bytes.
    """
    try:
        function = load_kernel(source, name, defines, device.index or 0)
        if shared:
            allow_shared_memory(function, shared)
    except (ImportError, CompileError) as error:
        log.warning("%s, which is slower: %s", otherwise, error)
        return False
    return True


@functools.lru_cache(1024)
def launch_config(
    blocks: tuple[int, int, int],
    threads: int,
    stream: int,
    cluster: tuple[int, int, int] | None = None,
    shared: int = 0,
) -> Any:
    """Return how a kernel is launched (a CUlaunchConfig): while the one ahead of it still runs."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream, config.sharedMemBytes = stream, shared
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
    shared: int = 0,
) -> None:
    """Launch on the current stream.

    Args:
        function: What `compiled` returned.
        blocks: The grid.
        threads: Of a block.
        arguments: Tensors go by address, None as null, whole numbers as int, others as float, the driver's
            own structures (a CUtensorMap) as they are.
        cluster: Blocks that run together.
        shared: Bytes of shared memory that a block has besides what the kernel declares.

    Raises:
        CompileError: the driver refused.
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
    if shared:
        allow_shared_memory(function, shared)
    stream = torch.cuda.current_stream(device).cuda_stream
    config = launch_config(grid, threads, stream, cluster, shared)
    check_status(driver.cuLaunchKernelEx(config, function, (tuple(values), tuple(types)), 0), "launching a kernel")
