"""Lets all ranks of a group run on one GPU, where a machine has no more: for tests alone.

Python imports it as a process begins, for its folder is on PYTHONPATH. Ranks find GPU 0 for theirs, and gloo
takes NCCL's place, which refuses two ranks on one GPU. Everything else is what runs on several: processes,
plans, peer memory and its kernels, graphs. Ranks wait for one another while the GPU turns from process to
process, so that a step takes a fraction of a second.
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
MOST_RANKS = 8


class Loader(importlib.abc.Loader):
    """Changes a module once it is loaded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        CHANGES[module.__name__](module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are to be changed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


class Seen:
    """A module or object, but for some of its attributes."""

    def __init__(self, real: Any, **others: Any) -> None:
        self.__dict__.update(others)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def change_choices(module: Any) -> None:
    """Let there be GPUs enough."""
    cuda = Seen(module.torch.cuda, device_count=lambda: MOST_RANKS)
    module.torch = Seen(module.torch, cuda=cuda)


def change_place(module: Any) -> None:
    """Let every rank find the one GPU."""
    import dataclasses

    import torch

    given = module.local_place

    def local_place(*args: Any, **kwargs: Any) -> Any:
        place = given(*args, **kwargs)
        device = place.device if place.device.type == "cpu" else torch.device("cuda", 0)
        return dataclasses.replace(place, device=device)

    module.local_place = local_place


def change_group(module: Any) -> None:
    """Let gloo take NCCL's place."""
    given = module.dist.init_process_group

    def init_process_group(backend: str, *, device_id: Any = None, **kwargs: Any) -> None:
        given("gloo", **kwargs)

    module.dist = Seen(module.dist, init_process_group=init_process_group)


CHANGES = {
    "mizzen.engine.loading.resolve": change_choices,
    "mizzen.engine.loading.placement": change_place,
    "mizzen.parallel.process_group": change_group,
}
sys.meta_path.insert(0, Finder())
