# SPDX-License-Identifier: Apache-2.0
"""Files of a model as `mizzen inspect` sees them: config.json, and sizes of the weights."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import ConfigError, Fields, parse_object
from mizzen.models.registry import PREPROCESSOR_CONFIG
from mizzen.quantization.reader import MODELOPT_FILE, add_modelopt_file, load_fields
from mizzen.quantization.schemes import Unquantized
from mizzen.quantization.stored_tensors import UNUSED, find_dtypes
from mizzen.weights.checkpoint_files import (
    FLOATING,
    INDEX,
    SINGLE,
    WeightsError,
    check_dtype,
    checkpoint_files,
    describe_gguf,
    explain_missing,
    is_needless,
    read_header,
)

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Weights in safetensors files.

    Attributes:
        size: bytes of all files.
        tensors: data type of each tensor, as safetensors names it; empty if no header was read.
        elements: number of elements of each tensor; empty if no header was read.
    """

    size: int
    tensors: Mapping[str, str]
    elements: Mapping[str, int] = field(default_factory=dict)

    def find_problem(self, name: str, config: ModelConfig) -> str:
        """Return why the tensors of the model `name` cannot be loaded; empty if nothing speaks against it.

        Only tensors that the engine loads count. It is not known which buffers a model of Transformers
        ignores, so that only its weights count.
        """
        for tensor, kind in self.tensors.items():
            own = config.text_tensors.find_own_name(tensor) if config.text_tensors else tensor
            weight = config.implementation == "native" or tensor.endswith(".weight")
            if own is None or is_needless(own) or not weight:
                continue
            layer, _, suffix = own.rpartition(".")
            try:
                scheme = config.quantization.find_scheme(layer)  # embeddings and norms have one, too
                unquantized = suffix == "weight" and kind in FLOATING
                if not unquantized and (suffix not in UNUSED or isinstance(scheme, Unquantized)):
                    check_dtype(Path(name), tensor, kind, find_dtypes(scheme, suffix))
            except ValueError as error:
                return str(error)
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Files of a model.

    Attributes:
        name: folder, file or source that the user named.
        fields: fields of config.json; None if there is no such file.
        weights: weights in safetensors files; None without such files.
        problem: reason why the files cannot be loaded, and a remedy; empty if there is no such reason.
        preprocessor: fields of preprocessor_config.json; empty if there is no such file, or it is unknown.
    """

    name: str
    fields: Fields | None
    weights: WeightFiles | None = None
    problem: str = ""
    preprocessor: Mapping[str, Any] = field(default_factory=dict)


def read_config_file(path: Path) -> ModelFiles:
    """Read a file with the content of a config.json.

    Raises:
        ConfigError: the file cannot be read, or does not contain a JSON object.
    """
    return ModelFiles(name=str(path), fields=Fields.load(path.parent, path.name))


def read_folder(folder: Path) -> ModelFiles:
    """Read the configuration of a folder, and the headers of its safetensors files.

    A folder may consist of config.json alone, but if it has other files, weights must be among them.

    Raises:
        ConfigError: config.json is missing, although the folder has no GGUF file, or cannot be read.
    """
    names = [path.name for path in folder.iterdir()]
    problem = find_format_problem(names)
    if "config.json" not in names and problem:
        return ModelFiles(name=str(folder), fields=None, problem=problem)
    fields = load_fields(folder)
    if problem or names == ["config.json"]:
        return ModelFiles(name=str(folder), fields=fields, problem=problem)
    try:
        weights = read_weight_files(folder)
    except WeightsError as error:
        return ModelFiles(name=str(folder), fields=fields, problem=str(error))
    preprocessor: Mapping[str, Any] = {}
    if PREPROCESSOR_CONFIG in names:
        preprocessor = Fields.load(folder, PREPROCESSOR_CONFIG).values
    return ModelFiles(name=str(folder), fields=fields, weights=weights, preprocessor=preprocessor)


def read_weight_files(folder: Path) -> WeightFiles:
    """Read the headers of the safetensors files of a folder.

    Raises:
        WeightsError: a file is missing or cannot be read.
    """
    tensors: dict[str, str] = {}
    elements: dict[str, int] = {}
    size = 0
    for path in checkpoint_files(folder):
        try:
            entries, _ = read_header(path)
            size += path.stat().st_size
            found = {name: entry["dtype"] for name, entry in entries.items() if name != "__metadata__"}
            elements |= {name: math.prod(entries[name]["shape"]) for name in found}
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
        tensors |= found
    return WeightFiles(size=size, tensors=tensors, elements=elements)


def read_listing(name: str, sizes: Mapping[str, int], contents: Mapping[str, bytes]) -> ModelFiles:
    """Read the files of a remote model.

    Args:
        name: source of the model.
        sizes: size in bytes of each file of the model, by its path.
        contents: content of config.json and hf_quant_config.json, as far as they exist.

    Raises:
        ConfigError: config.json is missing, although the model has no GGUF file, or a file is not a JSON
            object.
    """
    problem = find_format_problem(sizes)
    if "config.json" not in contents:
        if problem:
            return ModelFiles(name=name, fields=None, problem=problem)
        raise ConfigError(f"{name} has no config.json: name the repository or folder of a model")
    values = parse_object(contents["config.json"], f"config.json of {name}")
    if not problem and set(sizes) != {"config.json"} and not {INDEX, SINGLE} & set(sizes):
        problem = explain_missing(name)
    size = sum(count for path, count in sizes.items() if is_weight_file(path))
    weights = WeightFiles(size=size, tensors={}) if size else None
    fields = Fields(values)
    if MODELOPT_FILE in contents:
        found = parse_object(contents[MODELOPT_FILE], f"{MODELOPT_FILE} of {name}")
        fields = add_modelopt_file(fields, found)
    return ModelFiles(name=name, fields=fields, weights=weights, problem=problem)


def is_weight_file(path: str) -> bool:
    """Return whether a path is that of a safetensors file which the engine reads."""
    return "/" not in path and path.startswith("model") and path.endswith(".safetensors")


def find_format_problem(names: Iterable[str]) -> str:
    """Return why the files of a model have the wrong format for weights; empty if they may be right."""
    files = sorted(names)
    if any(name.endswith(".safetensors") for name in files):
        return ""
    if gguf := next((name for name in files if name.endswith(".gguf")), ""):
        return describe_gguf(gguf)
    if pickle := next((name for name in files if name.endswith(PICKLES)), ""):
        return (
            f"{pickle} is a pickle, which may contain code and is never loaded: convert the weights to "
            "safetensors with save_pretrained of Transformers"
        )
    return ""
