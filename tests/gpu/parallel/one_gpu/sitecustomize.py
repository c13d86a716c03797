# SPDX-License-Identifier: Apache-2.0
"""Lets all ranks of a group share the GPU of a machine that has only one; used only by tests.

Python imports this module when a process starts, because its folder is on PYTHONPATH. Every rank uses GPU 0,
and gloo replaces NCCL, which refuses two ranks on one GPU. Everything else runs as on several GPUs:
processes, plans, peer memory and its kernels, graphs. Ranks wait while the GPU switches between processes, so
a step takes a fraction of a second.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# PyTorch's own switch for tests like these.
os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
MAX_RANKS = 8


class PatchingLoader(importlib.abc.Loader):
    """Patches a module after it is loaded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        PATCHES[module.__name__](module)


class PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules to patch."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = PatchingLoader(spec.loader)
        return spec


class Overridden:
    """A module or object with some attributes replaced."""

    def __init__(self, real: Any, **others: Any) -> None:
        self.__dict__.update(others)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def patch_device_count(module: Any) -> None:
    """Report more GPUs than there are, so that a group of several ranks can start."""
    cuda = Overridden(module.torch.cuda, device_count=lambda: MAX_RANKS)
    module.torch = Overridden(module.torch, cuda=cuda)


def patch_rank_placement(module: Any) -> None:
    """Place every rank on GPU 0."""
    import dataclasses

    import torch

    original = module.rank_placement

    def rank_placement(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        device = config.device if config.device.type == "cpu" else torch.device("cuda", 0)
        return dataclasses.replace(config, device=device)

    module.rank_placement = rank_placement


def patch_process_group(module: Any) -> None:
    """Use gloo instead of NCCL."""
    original = module.dist.init_process_group

    def init_process_group(backend: str, *, device_id: Any = None, **kwargs: Any) -> None:
        original("gloo", **kwargs)

    module.dist = Overridden(module.dist, init_process_group=init_process_group)


PATCHES = {
    "mizzen.engine.loading.resolve": patch_device_count,
    "mizzen.engine.loading.placement": patch_rank_placement,
    "mizzen.parallel.process_group": patch_process_group,
}
sys.meta_path.insert(0, PatchingFinder())
