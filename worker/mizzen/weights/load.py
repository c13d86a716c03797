# SPDX-License-Identifier: Apache-2.0
"""Loads safetensors checkpoints straight into a model's merged, sharded parameters.

`mizzen.engine.loading.model_setup` calls it with the model's `WeightTarget`s. Each rank reads only its own
shards, and the bytes between the short parts of a matrix's rows.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import TensorNames
from mizzen.models.text_tensors import PartTensors
from mizzen.weights.checkpoint_files import (
    WeightsError,
    check_dtype,
    checkpoint_files,
    format_names,
    is_needless,
)
from mizzen.weights.staged import StagedTensor, load_staged
from mizzen.weights.stream import FileRange, SafetensorsHeader, stream_to_device

ProgressCallback = Callable[[int, int], None]
"""Function that receives the number of bytes done and the total number of bytes."""

PACKED_WEIGHTS = ("qweight", "weight_packed")
"""Ends of the names of tensors that hold packed integers."""
NAMES = TensorNames()
"""Names of the tensors of Llama and most other families."""


@contextmanager
def open_safetensors(path: Path) -> Iterator[tuple[SafetensorsHeader, Any]]:
    """Open a safetensors file; yield its header and a handle that reads its tensors.

    Raises:
        WeightsError: the file cannot be opened, or a read within the `with` block fails.
    """
    try:
        header = SafetensorsHeader(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            yield header, file
    except WeightsError:
        raise
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error


def is_ignorable(name: str, tied: bool, names: TensorNames) -> bool:
    """Return whether a tensor need not be loaded, because it is redundant or a scale of the KV cache.

    `tied` says that the head shares the embedding's table, which makes the head's own tensor redundant.
    """
    return is_needless(name) or (tied and name == f"{names.head}.weight")


def read_ahead(path: Path) -> None:
    """Let the operating system begin to read a whole file into its page cache.

    Without this, a mapped file is read page by page from the disk, in the order in which tensors are
    converted.

    Raises:
        OSError: the file cannot be opened.
    """
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


class WantedTensors:
    """Targets that have not been filled yet, by the name of their tensor.

    A tensor that holds several layers has several targets.
    """

    def __init__(self, targets: Iterable[WeightTarget]) -> None:
        self.groups: dict[str, list[WeightTarget]] = {}
        self.other_names: dict[str, str] = {}
        for target in targets:
            self.groups.setdefault(target.name, []).append(target)
            self.other_names |= dict.fromkeys(target.other_names, target.name)

    def pop(self, name: str) -> list[WeightTarget] | None:
        """Remove and return the targets of a tensor; None if no target has this name, or not any more."""
        return self.groups.pop(self.other_names.get(name, name), None)

    def missing(self) -> list[str]:
        """Return the names of the remaining tensors that a checkpoint must have."""
        return [name for name, group in self.groups.items() if not all(target.optional for target in group)]

    def size(self) -> int:
        """Return the size of the remaining targets in bytes."""
        return sum(target_bytes(target) for group in self.groups.values() for target in group)


def load_checkpoint(
    folder: Path,
    targets: Iterable[WeightTarget],
    *,
    tied: bool,
    progress: ProgressCallback,
    names: TensorNames = NAMES,
    part: PartTensors | None = None,
    ignored: Sequence[re.Pattern[str]] = (),
    ignored_zeros: Sequence[re.Pattern[str]] = (),
) -> None:
    """Fill every target from the safetensors files of a model folder.

    Args:
        folder: Model folder.
        targets: Destinations of all tensors.
        tied: Whether the head shares the embedding; the files may then contain a copy of it as the head.
        progress: Called after each part that is loaded.
        names: Names of the checkpoint's tensors. Checkpoints of embedding models may omit their prefix.
        part: Tensors of the part that is loaded, if the checkpoint also holds other parts.
        ignored: Patterns of the names of further tensors that need not be loaded.
        ignored_zeros: Patterns of the names of tensors that need not be loaded if all their elements are 0.

    Raises:
        WeightsError: tensors are missing or unexpected, or have a wrong dtype or shape, or a file cannot be
            read.
    """
    wanted = WantedTensors(targets)
    total = wanted.size()
    done, unexpected = 0, []
    file_ranges: list[FileRange] = []
    staged: list[StagedTensor] = []
    progress(0, total)

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    def is_redundant(name: str, file: Any, stored_name: str) -> bool:
        if is_ignorable(name, tied, names) or any(pattern.search(name) for pattern in ignored):
            return True
        if not any(pattern.search(name) for pattern in ignored_zeros):
            return False
        return not file.get_tensor(stored_name).float().any()

    for path in checkpoint_files(folder):
        with open_safetensors(path) as (header, file):
            ahead = False
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                own = own_name(name, part)
                if own is None:
                    continue
                group = wanted.pop(own) or wanted.pop(names.prefix + own)
                if group is None:
                    if not is_redundant(own, file, name):
                        unexpected.append(name)
                    continue
                source = file.get_slice(name)
                for target in (
                    member if member.name == name else replace(member, name=name) for member in group
                ):
                    check_tensor(path, source, target)
                    if not target.destination.numel():
                        continue
                    if target.staging is not None:
                        staged.append(StagedTensor(header, target))
                        continue
                    file_range = header.file_range(target) if target.shape else None
                    if file_range is not None:
                        file_ranges.append(file_range)
                        continue
                    if not ahead and target.destination.device.type == "cpu":
                        read_ahead(path)
                        ahead = True
                    target.destination.copy_(read_shard(source, target))
                    count(target_bytes(target))
    wrong = {"missing": wanted.missing(), "unexpected": unexpected}
    if problems := [f"{kind}: {format_names(names)}" for kind, names in wrong.items() if names]:
        raise WeightsError(f"{folder}: tensors are {'; '.join(problems)}")
    try:
        stream_to_device(file_ranges, count)
        load_staged(staged, read_staged, count)
    except OSError as error:
        raise WeightsError(f"{folder} cannot be read: {error}") from error
    if left_out := wanted.size():
        count(left_out)


def read_shard(source: Any, target: WeightTarget) -> torch.Tensor:
    """Read this rank's shard of a tensor, which may have another shape than the target names first.

    `source` is a safetensors slice. Of the dimensions before the first that differs, only the shard is read.
    """
    stored = tuple(source.get_shape())
    if stored == target.shape:
        return source[target.shard or ...]
    equal = next(i for i in range(len(stored) + 1) if stored[: i + 1] != target.shape[: i + 1])
    part = source[target.shard[:equal]] if equal else source[...]
    whole = (slice(None),) * equal
    shape = (*part.shape[:equal], *target.shape[equal:])
    return part.reshape(shape)[(*whole, *target.shard[equal:])]


def read_staged(tensor: StagedTensor) -> torch.Tensor:
    """Read this rank's shard of a tensor that is loaded after all files were closed."""
    with open_safetensors(tensor.header.path) as (_, file):
        return read_shard(file.get_slice(tensor.target.name), tensor.target)


def target_bytes(target: WeightTarget) -> int:
    """Return the size of a target in bytes."""
    return target.destination.numel() * target.destination.element_size()


def own_name(name: str, part: PartTensors | None) -> str | None:
    """Return the own name of a checkpoint's tensor in a part of it; None if it is in another part."""
    return name if part is None else part.find_own_name(name)


def has_untied_head(
    folder: Path, names: TensorNames = NAMES, text_tensors: PartTensors | None = None
) -> bool:
    """Return whether a checkpoint contains a head that differs from its embedding.

    Raises:
        WeightsError: a file cannot be read.
    """
    head_name, embedding_name = f"{names.head}.weight", f"{names.embedding}.weight"
    packed = {f"{names.head}.{suffix}" for suffix in PACKED_WEIGHTS}
    searched = {head_name: head_name, embedding_name: embedding_name}
    searched[names.prefix + embedding_name] = embedding_name
    places: dict[str, tuple[Path, str]] = {}
    for path in checkpoint_files(folder):
        with open_safetensors(path) as (_, file):
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if (own := own_name(name, text_tensors)) in packed:
                    return True
                if own in searched:
                    places[searched[own]] = (path, name)
    if len(places) < 2:
        return False
    tensors: dict[str, torch.Tensor] = {}
    for part, (path, name) in places.items():
        with open_safetensors(path) as (_, file):
            tensors[part] = file.get_tensor(name)
    head, embedding = tensors[head_name], tensors[embedding_name]
    return head.dtype != embedding.dtype or not torch.equal(head, embedding)


def tensor_names(folder: Path) -> list[str]:
    """Return the names of all tensors of a checkpoint.

    Raises:
        WeightsError: a file cannot be read.
    """
    names: list[str] = []
    for path in checkpoint_files(folder):
        with open_safetensors(path) as (_, file):
            names += file.keys()
    return names


def check_tensor(path: Path, source: Any, target: WeightTarget) -> None:
    """Check the dtype and shape of a tensor against its target; `source` is a safetensors slice.

    Raises:
        WeightsError: the tensor has another dtype or shape than the target.
    """
    name, kind = target.name, source.get_dtype()
    check_dtype(path, name, kind, target.dtypes)
    shape = tuple(source.get_shape())
    if shape not in (target.shape, *target.other_shapes):
        raise WeightsError(
            f"{path}: {name} has the shape {list(shape)}, but config.json implies {list(target.shape)}"
        )


def fill_dummy(targets: Iterable[WeightTarget], *, seed: int, progress: ProgressCallback) -> None:
    """Fill every target with random values, which depend only on the seed and on the tensor's name and shape.

    A shard gets the values that the full tensor would have at the shard's position, so all ranks together
    hold one model.
    `progress` is called after each target.
    """
    all_targets = list(targets)
    total, done = sum(target_bytes(target) for target in all_targets), 0
    missing = Counter(id(target.staging) for target in all_targets)
    for target in all_targets:
        staging, destination = target.staging, target.destination
        if staging is not None:
            staging.open()
            destination = staging.place(destination)
        fill_target(target, destination, seed)
        missing[id(staging)] -= 1
        if staging is not None and not missing[id(staging)]:
            staging.close()
        done += target_bytes(target)
        progress(done, total)


def fill_target(target: WeightTarget, destination: torch.Tensor, seed: int) -> None:
    """Fill the destination of one target with dummy values."""
    if not destination.numel():
        return
    generator = torch.Generator(destination.device).manual_seed(seed ^ zlib.crc32(target.name.encode()))
    if isinstance(target.fill, int | float):
        destination.fill_(target.fill)
        return
    full = destination
    if tuple(full.shape) != target.shape:
        full = torch.empty(target.shape, dtype=full.dtype, device=full.device)
    (target.fill or fill_normal)(full, generator)
    if full is not destination:
        destination.copy_(full[target.shard])


def fill_normal(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a weight matrix with random values, so that its outputs are about as large as its inputs."""
    columns = weight.shape[-1] if weight.ndim > 1 else math.inf
    weight.normal_(0, 1 / math.sqrt(columns), generator=generator)
