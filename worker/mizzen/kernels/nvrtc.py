"""Compiles kernels written in CUDA C++, and launches them while the kernel ahead of them still runs."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch


class CompileError(RuntimeError):
    """NVRTC or the driver refused a kernel; the message says why."""


def checked(result: tuple[Any, ...], what: str) -> Any:
    """Return what a call of the CUDA bindings gives besides its status.

    Raises:
        CompileError: the status is not success.
    """
    if int(result[0]) != 0:
        raise CompileError(f"{what}: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def cubin(source: str, name: str, defines: tuple[tuple[str, int], ...], capability: tuple[int, int]) -> bytes:
    """Compile a source with these definitions for a GPU's capability.

    Raises:
        CompileError: it does not compile; the message is the compiler's.
    """
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []), name)
    options = [f"-arch=sm_{capability[0]}{capability[1]}", *(f"-D{key}={value}" for key, value in defines)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status[0]) != 0:
        text = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program), name)
        nvrtc.nvrtcGetProgramLog(program, text)
        raise CompileError(text.decode())
    code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program), name)
    checked(nvrtc.nvrtcGetCUBIN(program, code), name)
    return code


@functools.cache
def compiled(source: str, name: str, defines: tuple[tuple[str, int], ...], device: int) -> Any:
    """Return a kernel (a CUfunction) of a source, compiled with these definitions for a device.

    Raises:
        CompileError: it cannot be compiled here.
    """
    from cuda.bindings import driver

    code = cubin(source, name, defines, torch.cuda.get_device_capability(device))
    torch.cuda.current_stream(device)  # a context is there
    module = checked(driver.cuModuleLoadData(code), f"loading {name}")
    return checked(driver.cuModuleGetFunction(module, name.encode()), f"loading {name}")


@functools.lru_cache(1024)
def launch_config(blocks: int, threads: int, stream: int) -> Any:
    """Return how a kernel is launched (a CUlaunchConfig): while the one ahead of it still runs."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream = stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


def launch(
    function: Any, blocks: int, threads: int, arguments: tuple[torch.Tensor | int | float, ...]
) -> None:
    """Launch on the current stream: tensors by address, whole numbers as int, others as float.

    Raises:
        CompileError: the driver refused.
    """
    from cuda.bindings import driver

    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    values, types = [], []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            values.append(argument.data_ptr())
            types.append(ctypes.c_void_p)
        else:
            values.append(argument)
            types.append(ctypes.c_int if isinstance(argument, int) else ctypes.c_float)
    config = launch_config(blocks, threads, torch.cuda.current_stream(device).cuda_stream)
    checked(driver.cuLaunchKernelEx(config, function, (tuple(values), tuple(types)), 0), "launching a kernel")
