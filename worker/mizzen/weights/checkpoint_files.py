# SPDX-License-Identifier: Apache-2.0
"""Finds the safetensors files of a model folder, and reads their headers.

Importing this module does not import torch: `mizzen inspect` uses it too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATING = ("BF16", "F16", "F32", "F64")
"""Dtypes of unquantized weights, as safetensors names them."""
NEEDLESS = (
    "rotary_emb.inv_freq",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
"""Ends of the names of tensors that are no weights: derived values, and scales of attention in 8 bits."""
WEIGHTS_ADVICE = "give a folder with config.json, the tokenizer and safetensors"
MAX_LISTED = 5
MAX_HEADER_BYTES = 100 << 20
LFS_POINTER = b"version https://git-lfs."
"""First bytes of the pointer file that Git LFS leaves instead of a large file."""


class WeightsError(ValueError):
    """A checkpoint cannot be loaded; the message names the files and tensors concerned."""


def format_names(names: Iterable[str]) -> str:
    """Return the first few names and the number of further names, as text for an error message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else ""
    return ", ".join(ordered[:MAX_LISTED]) + more


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: those in the index, or the single file.

    Raises:
        WeightsError: the folder has neither an index nor the single file, or the index is invalid or names
            missing files.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise WeightsError(explain_missing(str(folder)))
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of safetensors files: {error!r}") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise WeightsError(f"{index} names files outside the folder: {outside}")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise WeightsError(f"{index} names files that are missing: {format_names(missing)}")
    return [folder / name for name in names]


def explain_missing(model: str) -> str:
    """Return the message for a model that has neither an index nor the single file."""
    return f"{model} has neither {SINGLE} nor {INDEX}: weights are read only from safetensors"


def describe_gguf(name: str) -> str:
    """Return an error message for a file in the GGUF format."""
    return (
        f"{name!r} is in the GGUF format, which is not supported; {WEIGHTS_ADVICE}: "
        "use the original checkpoint from which the file was made"
    )


def is_needless(name: str) -> bool:
    """Return whether a tensor is no weight; other code reads the scales (`mizzen.weights.kv_scales`)."""
    return name.endswith(NEEDLESS)


def check_dtype(path: Path, name: str, kind: str, dtypes: tuple[str, ...] = ()) -> None:
    """Check the dtype of a tensor.

    Args:
        path: File, for the message.
        name: Name of the tensor.
        kind: Its dtype, as safetensors names it.
        dtypes: Dtypes that the tensor of a quantized layer may have; empty for unquantized tensors.

    Raises:
        WeightsError: the tensor has another dtype.
    """
    if kind in (dtypes or FLOATING):
        return
    if dtypes:
        raise WeightsError(
            f"{path}: {name} is {kind}, but the configuration of the quantized weights implies "
            f"{' or '.join(dtypes)}: use a checkpoint whose tensors and configuration agree"
        )
    raise WeightsError(
        f"{path}: {name} is {kind}, but config.json does not describe it as quantized: use a checkpoint in "
        "bfloat16, float16 or float32, or one whose config.json describes its quantization"
    )


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file.

    Returns:
        The entry of each tensor by its name ("dtype", "shape" and "data_offsets"), possibly with an entry
        `__metadata__`; and the offset of the data in bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is a Git LFS pointer, or its header is not valid JSON or too long.
        struct.error: the file is shorter than 8 bytes.
    """
    with path.open("rb") as file:
        begin = file.read(len(LFS_POINTER))
        if begin == LFS_POINTER:
            raise ValueError("it is only a pointer of Git LFS: fetch the file itself (git lfs pull)")
        (size,) = struct.unpack("<Q", begin[:8])
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {size} bytes, more than {MAX_HEADER_BYTES}")
        file.seek(8)
        return json.loads(file.read(size)), 8 + size
