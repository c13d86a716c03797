"""Reads safetensors checkpoints straight into a model's (merged, sharded) parameters."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mizzen.layers.build import Target
from mizzen.weights.stream import Header, Piece, stream

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 5
BASE = "model."
"""How names of all but the head begin, but for checkpoints of embedding models, which may leave it out."""
KV_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")


class WeightsError(ValueError):
    """A checkpoint cannot be loaded; the message names files and tensors."""


def some(names: Iterable[str]) -> str:
    """List names, the first few of many."""
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def checkpoint_files(folder: Path) -> list[Path]:
    """Return a model folder's safetensors files: those that the index names, else the single one.

    Raises:
        WeightsError: there is none, or the index names files that are missing.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise WeightsError(f"{folder} holds neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is no index of safetensors files: {error!r}") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise WeightsError(f"{index} names files outside the folder: {outside}")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise WeightsError(f"{index} names files that are missing: {some(missing)}")
    return [folder / name for name in names]


def may_be_ignored(name: str, tied: bool) -> bool:
    """Tell whether a tensor is derived from others, or is none of the weights (see `kv_scales`)."""
    derived = name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
    return derived or name.endswith(KV_SCALES)


def load_checkpoint(folder: Path, targets: Iterable[Target], *, tied: bool, progress: Progress) -> None:
    """Fill every target from the folder's safetensors.

    `tied` says that the head shares the embedding, so that a copy of it in the files is not unexpected.

    Raises:
        WeightsError: tensors are missing, unexpected or of another shape, or a file cannot be read.
    """
    wanted = {target.name: target for target in targets}
    total = sum(size_of(target) for target in wanted.values())
    done, unexpected = 0, []
    pieces: list[Piece] = []
    progress(0, total)
    for path in checkpoint_files(folder):
        try:
            header = Header(path)
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    target = wanted.pop(name, None) or wanted.pop(BASE + name, None)
                    if target is None:
                        if not may_be_ignored(name, tied):
                            unexpected.append(name)
                        continue
                    target = replace(target, name=name)
                    source = file.get_slice(name)
                    check_shape(path, source, target)
                    if not target.into.numel():
                        continue
                    piece = header.piece(target) if target.into.device.type == "cuda" else None
                    if piece is not None:
                        pieces.append(piece)
                        continue
                    target.into.copy_(source[target.part])
                    done += size_of(target)
                    progress(done, total)
        except WeightsError:
            raise
        except (SafetensorError, OSError, ValueError, struct.error) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
    if wanted:
        raise WeightsError(f"{folder}: tensors are missing: {some(wanted)}")
    if unexpected:
        raise WeightsError(f"{folder}: tensors are unexpected: {some(unexpected)}")

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    try:
        stream(pieces, count)
    except OSError as error:
        raise WeightsError(f"{folder} cannot be read: {error}") from error


def size_of(target: Target) -> int:
    """Return the bytes of a target."""
    return target.into.numel() * target.into.element_size()


def check_shape(path: Path, source: Any, target: Target) -> None:
    """Compare the shape of a tensor (a safetensors slice) with what is wanted.

    Raises:
        WeightsError: they differ.
    """
    shape = tuple(source.get_shape())
    if shape != target.shape:
        raise WeightsError(
            f"{path}: {target.name} has the shape {list(shape)}, config.json means {list(target.shape)}"
        )


def fill_dummy(targets: Iterable[Target], *, seed: int, progress: Progress) -> None:
    """Fill every target with seeded random values, the same for a tensor's name on every run.

    A part of a tensor gets what the whole one would have there, so that ranks hold one model together.
    """
    chosen = list(targets)
    total, done = sum(size_of(target) for target in chosen), 0
    for target in chosen:
        device = target.into.device
        generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(target.name.encode()))
        if target.ones:
            target.into.fill_(1)
        else:
            columns = target.shape[-1] if len(target.shape) > 1 else math.inf
            whole = target.into
            if tuple(whole.shape) != target.shape:
                whole = torch.empty(target.shape, dtype=whole.dtype, device=device)
            whole.normal_(0, 1 / math.sqrt(columns), generator=generator)
            if whole is not target.into:
                target.into.copy_(whole[target.part])
        done += size_of(target)
        progress(done, total)
